"""Kernel packs: what is in them, who finds it, and what is refused; one compilation of a kernel on a machine."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import foci
from foci import kernel_packs
from foci.backends import compile_lock, disk, installed_packs
from foci.backends.cpu import build
from foci.backends.pack_file import BrokenPack, Entry, Pack, write_pack
from foci.errors import ArgumentError
from foci_cli.app import app

KEY = "0123456789abcdef" * 4
ENTRIES = [Entry(KEY, "kernel", {"kernel.cubin": b"code", "kernel.json": b"{}"}), Entry(KEY[::-1], "other", {"other.cubin": b"more"})]


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FOCI_CACHE_DIR", str(tmp_path / "cache"))
    installed_packs.forget()
    yield
    monkeypatch.undo()
    installed_packs.forget()


def changed(pack, change):
    """The pack with its files, by name, changed by `change`."""
    with zipfile.ZipFile(pack) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    change(files)
    with zipfile.ZipFile(pack, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def test_a_pack_has_what_was_written(tmp_path):
    path = tmp_path / "a.foci-kernels"
    assert write_pack(path, "gpu", {"arch": "sm_90"}, [*ENTRIES, ENTRIES[0]]) == 2
    pack = Pack(path)
    pack.verify()
    assert (pack.kind, pack.facts, pack.names) == ("gpu", {"arch": "sm_90"}, {KEY: "kernel", KEY[::-1]: "other"})
    assert pack.entry(KEY) == ENTRIES[0]
    assert pack.entry("f" * 64) is None
    assert [file.name for file in tmp_path.iterdir()] == ["a.foci-kernels"]


def test_the_same_entries_give_the_same_bytes(tmp_path):
    write_pack(tmp_path / "a", "gpu", {"arch": "sm_90", "triton": "3.7.1"}, ENTRIES)
    time.sleep(2)  # a zip archive counts time in twos
    write_pack(tmp_path / "b", "gpu", {"triton": "3.7.1", "arch": "sm_90"}, ENTRIES[::-1])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


DAMAGE = {
    "other code": lambda files: files.update({f"{KEY}/kernel.cubin": b"evil"}),
    "no code": lambda files: files.pop(f"{KEY}/kernel.cubin"),
}
FOREIGN = {
    "no manifest": lambda files: files.pop("manifest.json"),
    "another format": lambda files: files.update({"manifest.json": b'{"format": 2}'}),
    "no JSON": lambda files: files.update({"manifest.json": b"hello"}),
    "a way out": lambda files: files.update({"manifest.json": files["manifest.json"].replace(b"kernel.cubin", b"../../x.cubin")}),
    "a key that is a way": lambda files: files.update({"manifest.json": files["manifest.json"].replace(KEY.encode(), b"../" * 12)}),
    "an entry without files": lambda files: files.update({"manifest.json": files["manifest.json"].replace(b'"files"', b'"filed"')}),
}


# START-02
@pytest.mark.parametrize("damage", [*DAMAGE, *FOREIGN])
def test_a_broken_pack_is_refused(tmp_path, damage):
    path = tmp_path / "a.foci-kernels"
    write_pack(path, "gpu", {}, ENTRIES)
    changed(path, (DAMAGE | FOREIGN)[damage])
    with pytest.raises(BrokenPack, match="a.foci-kernels is"):
        kernel_packs.import_pack(path)
    assert kernel_packs.installed() == []


def test_no_change_of_a_byte_goes_unnoticed_or_unexplained(tmp_path):
    path, draw = tmp_path / "a.foci-kernels", random.Random(0)
    write_pack(path, "gpu", {}, ENTRIES)
    original = path.read_bytes()
    for _ in range(3000):
        content = bytearray(original)
        for _ in range(draw.choice((1, 1, 4))):
            content[draw.randrange(len(content))] = draw.randrange(256)
        path.write_bytes(content)
        try:
            pack = Pack(path)
            entries = [pack.entry(key) for key in pack.names]
        except BrokenPack:
            continue
        assert all(entry.files in [known.files for known in ENTRIES] for entry in entries)


@pytest.mark.parametrize("content", [b"", b"PK", b"#!/bin/sh"])
def test_a_file_that_is_no_pack_is_refused(tmp_path, content):
    path = tmp_path / "a.foci-kernels"
    path.write_bytes(content)
    with pytest.raises(BrokenPack):
        kernel_packs.import_pack(path)


def test_an_imported_pack_is_found_and_cleared(tmp_path):
    path = tmp_path / "a.foci-kernels"
    write_pack(path, "gpu", {"arch": "sm_90"}, ENTRIES)
    kept = kernel_packs.import_pack(path).path
    assert [pack.path for pack in kernel_packs.installed()] == [kept]
    assert installed_packs.entry("gpu", KEY) == ENTRIES[0]
    assert installed_packs.entry("cpu", KEY) is None
    assert kernel_packs.clear() == [kept]
    assert kernel_packs.installed() == []


def test_what_was_damaged_after_it_was_imported_is_said_and_not_used(tmp_path):
    path = tmp_path / "a.foci-kernels"
    write_pack(path, "gpu", {}, ENTRIES)
    kept = kernel_packs.import_pack(path).path
    changed(kept, DAMAGE["other code"])
    with pytest.warns(UserWarning, match="compiled instead of read"):
        assert installed_packs.entry("gpu", KEY) is None
    kept.write_bytes(b"")
    installed_packs.forget()
    with pytest.warns(UserWarning, match="a kernel pack is not used"):
        assert installed_packs.packs("gpu") == ()


# START-02
def test_a_package_brings_a_pack(tmp_path, monkeypatch):
    package = tmp_path / "site" / "kernels_of_a_test"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    write_pack(package / "a.foci-kernels", "gpu", {}, ENTRIES)
    info = tmp_path / "site" / "kernels_of_a_test-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels-of-a-test\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[foci.kernel_packs]\nany = kernels_of_a_test\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert installed_packs.entry("gpu", KEY) == ENTRIES[0]


# -- the CPU


def run(code, **environment):
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=300)


CALL = """
import torch, foci
q = torch.randn(1, 2, 64, 16, generator=torch.Generator().manual_seed(0))
with foci.use("cpu"):
    print(foci.attention(q, q, q, mask=foci.masks.causal()).sum().item())
"""


# START-02
@pytest.mark.slow
@pytest.mark.skipif(isinstance(build.toolchain(), str), reason="no C++ compiler")
def test_a_cpu_kernel_is_found_in_a_pack_where_there_is_no_compiler(tmp_path):
    first = run(CALL, FOCI_CACHE_DIR=str(tmp_path / "first"))
    assert first.returncode == 0, first.stderr
    export = f"from foci import kernel_packs; print(kernel_packs.export({str(tmp_path / 'a.foci-kernels')!r}, 'cpu').kernels)"
    assert int(run(export, FOCI_CACHE_DIR=str(tmp_path / "first")).stdout) >= 1
    elsewhere = {"FOCI_CACHE_DIR": str(tmp_path / "second"), "FOCI_CXX": "no-such-compiler"}
    refused = run(CALL, **elsewhere)
    assert "no-such-compiler" in refused.stderr
    assert refused.returncode != 0
    imported = run(f"from foci import kernel_packs; kernel_packs.import_pack({str(tmp_path / 'a.foci-kernels')!r})", **elsewhere)
    assert imported.returncode == 0, imported.stderr
    second = run(CALL, **elsewhere)
    assert second.returncode == 0, second.stderr
    assert second.stdout == first.stdout


# START-03
@pytest.mark.slow
@pytest.mark.skipif(isinstance(build.toolchain(), str), reason="no C++ compiler")
def test_many_processes_compile_a_kernel_once(tmp_path):
    """Also where one of them is killed while it compiles."""
    log = tmp_path / "compilations"
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *kernel.cc*) echo x >> {log}; sleep 3;; esac\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    environment = {**os.environ, "FOCI_CACHE_DIR": str(tmp_path / "cache"), "FOCI_CXX": str(compiler)}
    killed = subprocess.Popen([sys.executable, "-c", CALL], env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
    while not log.exists():
        assert killed.poll() is None
        time.sleep(0.1)
    processes = [subprocess.Popen([sys.executable, "-c", CALL], env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    os.killpg(killed.pid, signal.SIGKILL)
    said = {process.communicate(timeout=300)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(said) == 1
    assert log.read_text().count("x") == 2  # by the one that was killed, and by one of the others


# START-03
def test_a_lock_ends_with_its_process(tmp_path):
    code = "import sys, time; from foci.backends.compile_lock import locked\nwith locked('key'):\n    print('held', flush=True); time.sleep(60)"
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    waiter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        time.sleep(2)
        assert waiter.poll() is None
        holder.kill()
        assert waiter.stdout.readline() == "held\n"
    finally:
        holder.kill()
        waiter.kill()


# START-03
def test_a_process_forked_meanwhile_keeps_no_lock():
    with compile_lock.locked("key"):
        child = os.fork()
        if not child:
            time.sleep(20)
            os._exit(0)
    began = time.monotonic()
    with compile_lock.locked("key"):
        took = time.monotonic() - began
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert took < 5


# START-03
@pytest.mark.parametrize(("quiet", "seconds", "says"), [("", 0.3, True), ("1", 0.3, False), ("", 0.0, False)])
def test_a_long_wait_is_said_once(quiet, seconds, says, monkeypatch, capsys):
    monkeypatch.setenv("FOCI_QUIET", quiet)
    monkeypatch.setattr(compile_lock, "_PATIENCE", 0.1)
    with compile_lock.compiling("2 kernels"), compile_lock.compiling("the kernel within"):
        time.sleep(seconds)
    assert capsys.readouterr().err.count("foci compiles 2 kernels") == says


# -- GPU kernels, which are compiled without a GPU

SMALL = "decode D 64 bfloat16"


@pytest.fixture(scope="module")
def small_pack(tmp_path_factory):
    pytest.importorskip("triton", reason="Triton is not installed")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter compiles nothing")
    path = tmp_path_factory.mktemp("packs") / "small.foci-kernels"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "0")
        kernel_packs.build("sm_80", path, select=SMALL, jobs=2)
    return path


def run_offline(folder):
    environment = {**os.environ, "FOCI_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton"), "FOCI_SELF_CHECK": "0"}
    command = [sys.executable, "-m", "foci.kernel_packs.offline", "sm_80", f"{SMALL} forward"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def compiled_in(folder):
    """Kernels that were compiled with this cache folder, by meaning."""
    return sorted(path.stem for path in (folder / "kernels").glob("*.json"))


@pytest.mark.slow
def test_a_pack_of_gpu_kernels_says_what_it_is(small_pack):
    pack = Pack(small_pack)
    pack.verify()
    assert pack.facts["arch"] == "sm_80"
    assert {"attention_decode", "combine_splits"} <= set(pack.names.values())
    for key in pack.names:
        files = pack.entry(key).files
        assert sorted(name.rpartition(".")[2] for name in files) == ["cubin", "json"]
        assert json.loads(next(content for name, content in files.items() if name.endswith(".json")))["hash"] == ""


# START-02
@pytest.mark.slow
def test_what_a_pack_has_is_not_compiled(small_pack, tmp_path, monkeypatch):
    without, within = (disk.usable_folder(tmp_path / name) for name in ("without", "with"))
    run_offline(without)
    assert set(compiled_in(without)) == set(Pack(small_pack).names)
    monkeypatch.setenv("FOCI_CACHE_DIR", str(within))
    kernel_packs.import_pack(small_pack)
    run_offline(within)
    assert compiled_in(within) == []


# START-02
@pytest.mark.slow
def test_a_pack_is_built_reproducibly(small_pack, tmp_path):
    kernel_packs.build("sm_80", tmp_path / "again", select=SMALL, jobs=1)
    assert (tmp_path / "again").read_bytes() == small_pack.read_bytes()


# -- the command


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("build", "--arch", "sm_70"), "arch must be cpu, or sm_80 or a later compute capability"),
        (("build", "--arch", "h100"), "got 'h100'"),
        (("build", "--arch", "cpu", "--set", "D 65"), "no common problem's name holds 'D 65'"),
        (("export", "--arch", "cpu", "x.foci-kernels"), "nothing that foci compiled for cpu is kept"),
        (("verify", __file__), "is no kernel pack"),
        (("import", __file__), "is no kernel pack"),
    ],
)
def test_what_cannot_be_done_is_one_line(arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["kernels", *arguments])
    assert done.exit_code == 2
    assert says in " ".join(done.output.replace("│", " ").split())


# START-02
def test_packs_by_the_command(tmp_path):
    path = tmp_path / "a.foci-kernels"
    write_pack(path, "cpu", {"arch": "cpu"}, ENTRIES)
    for arguments, says in (
        (("verify", str(path)), "2 kernels, all as the manifest says"),
        (("import", str(path)), "2 kernels in"),
        (("list",), "cpu"),
        (("clear",), "removed"),
    ):
        done = CliRunner().invoke(app, ["kernels", *arguments])
        assert done.exit_code == 0, done.output
        assert says in done.output


# START-03
def test_warm_runs_a_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys; print('ran', sys.argv[1:]); sys.exit(3)")
    done = CliRunner().invoke(app, ["kernels", "warm", str(script), "--its", "own"])
    assert done.exit_code == 3
    assert "ran ['--its', 'own']" in done.output


# START-03
def test_warm_waits_for_what_compiles_ahead(monkeypatch):
    waited = []
    compiling = pytest.importorskip("foci.backends.gpu.compiling", reason="Triton is not installed")
    monkeypatch.setattr(compiling, "wait_for_ahead", lambda: waited.append(True))
    query = torch.randn(1, 2, 16, 8)
    with kernel_packs.warm():
        foci.attention(query, query, query)
        assert not waited
    assert waited


def test_an_unknown_architecture_is_an_error():
    with pytest.raises(ArgumentError, match="arch must be cpu"):
        kernel_packs.export(Path("x"), "sm_1")
