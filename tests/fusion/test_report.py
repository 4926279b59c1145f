"""The report: what observers get, how it is printed, and the command that prints it for a script."""

# FUSE-05

import sys
import textwrap

import pytest
import torch
from rich.console import Console
from spelling_harness import graph_of, qkv
from typer.testing import CliRunner

import foci
from foci.fusion import Site, fuse, summary, table
from foci_cli.app import app

FUSED = Site(True, "/somewhere/site-packages/models/gpt.py:12", "score where kv_idx <= q_idx", None, "matmul-softmax-matmul")
DECLINED = Site(False, "", "", "the softmax is not over the keys", "sdpa")


def printed(sites):
    console = Console(width=140, record=True)
    console.print(table(sites))
    return console.export_text()


def test_equal_sites_are_one_row():
    text = printed([FUSED, FUSED, DECLINED])
    assert summary([FUSED, FUSED, DECLINED]) == "2 of 3 attentions fused"
    assert "2 of 3 attentions fused" in text
    rows = [line for line in text.splitlines() if "yes" in line or " no " in line]
    assert len(rows) == 2
    assert "models/gpt.py:12" in rows[0] and "somewhere" not in rows[0] and " 2 " in rows[0] and "kv_idx <= q_idx" in rows[0]
    assert "unknown" in rows[1] and "the softmax is not over the keys" in rows[1]


def test_a_table_without_rich_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.table", None)
    with pytest.raises(ModuleNotFoundError, match=r"foci\.fusion\.table needs rich, which is not installed: pip install 'foci\[cli\]'"):
        table([])


def test_formulas_are_no_markup():
    assert "c0[b, q_idx]" in printed([Site(True, "a.py:1", "score + c0[b, q_idx]", None, "mha")])


def test_an_attention_is_reported_whose_scores_and_weights_go_elsewhere():
    def attend(q, k, v):
        scores = torch.zeros_like(q @ k.mT)
        scores[:, :, 1:] = (q @ k.mT).cumsum(-1)[:, :, 1:]
        return scores.softmax(-1).cumsum(-1) @ v

    def routed(q, k, v):
        chosen = (q @ k[0, 0].mT).cumsum(-1)
        return chosen.softmax(-1).cumsum(-1).sum()

    for function, expected in ((attend, [False]), (routed, [])):
        torch._dynamo.reset()
        with foci.observe() as log:
            # one length: it reads the report of one graph
            foci.compile(function, rest="eager")(*qkv(20))
        assert [site.fused for site in log.fusions] == expected
        assert all("the scores go through" in site.reason for site in log.fusions)


def test_only_open_logs_are_told():
    def attend(q, k, v):
        return torch.softmax(q @ k.mT, -1) @ v

    with foci.observe() as closed:
        pass
    with foci.observe() as outer, foci.observe() as inner:
        torch._dynamo.reset()
        # one length: it reads the report of one graph
        foci.compile(attend, rest="eager")(*qkv(20))
    assert closed.fusions == []
    assert outer.fusions == inner.fusions
    assert [site.fused for site in outer.fusions] == [True]


def test_a_script_is_reported(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        import torch
        import foci

        def attend(x):
            return torch.softmax(x @ x.mT, dim=-1) @ x

        def other(x):
            return torch.softmax(x @ x.mT, dim=-2) @ x

        if __name__ == "__main__":
            x = torch.randn(2, 2, int(sys.argv[1]), 8)
            foci.compile(attend, rest="eager")(x)
            foci.compile(other, rest="eager")(x)
            sys.exit(3)
        """)
    )
    done = CliRunner().invoke(app, ["report", str(script), "20"], env={"COLUMNS": "260"})
    assert done.exit_code == 3, done.output
    assert "1 of 2 attentions fused" in done.output
    assert "train.py:7" in done.output.replace("\n", "")
    assert "the softmax is over dimension 2" in done.output


@pytest.mark.parametrize(
    ("exit", "code"),
    [("sys.exit()", 0), ("sys.exit(0)", 0), ("sys.exit(2)", 2), ("sys.exit('no data')", 1), ("raise SystemExit(7)", 7), ("pass", 0)],
)
def test_the_code_of_a_script_is_passed_on_after_the_report(tmp_path, exit, code):
    script = tmp_path / "train.py"
    script.write_text(f"import sys\n{exit}\n")
    done = CliRunner().invoke(app, ["report", str(script)])
    assert done.exit_code == code
    assert "no attention in what was compiled" in " ".join(done.output.split())
    assert ("no data" in done.output) == ("no data" in exit)


def test_a_script_that_compiles_nothing_is_told_so(tmp_path):
    script = tmp_path / "idle.py"
    script.write_text("print('nothing to see')\n")
    done = CliRunner().invoke(app, ["report", str(script)])
    assert done.exit_code == 0
    assert "no attention in what was compiled" in " ".join(done.output.split())


TALKING = torch.eye(4)
MISREAD = {
    "heads mixed behind the softmax": (
        lambda q, k, v: torch.einsum("bhqk,hg->bgqk", (q @ k.mT).softmax(-1), TALKING) @ v,
        "the softmax is over dimension 3, but the product that reads its weights sums over dimension 1",
    ),
    "heads mixed before the softmax": (
        lambda q, k, v: torch.einsum("bhqk,hg->bgqk", q @ k.mT, TALKING).softmax(-1) @ v,
        "the scores go through `einsum` between the product with the keys and the softmax",
    ),
    "softmax over heads": (
        lambda q, k, v: (q @ k.mT).softmax(1) @ v,
        "the softmax is over dimension 1, but the product that reads its weights sums over dimension 3",
    ),
    "softmax over queries": (
        lambda q, k, v: (q @ k.mT).softmax(-2) @ v,
        "the softmax is over dimension 2, but the product that reads its weights sums over dimension 3",
    ),
}


@pytest.mark.parametrize("name", MISREAD)
def test_reasons_name_the_dimensions(name):
    function, reason = MISREAD[name]
    fusion = fuse(graph_of(function, *qkv(20)), list(qkv(20)))
    assert [site.reason for site in fusion.sites] == [reason]


def test_a_reason_names_the_operation_that_also_reads():
    def read(q, k, v):
        weights = (q @ k.mT).softmax(-1)
        return weights @ v, weights.sort().values

    def written(q, k, v):
        scores = q @ k.mT
        weights = scores.softmax(-1)
        scores.zero_()
        return weights @ v, scores

    reasons = [fuse(graph_of(f, *qkv(20)), list(qkv(20))).sites[0].reason for f in (read, written)]
    assert "is also read by `sort`" in reasons[0]
    assert reasons[1] is not None and "`zero`" in reasons[1]
