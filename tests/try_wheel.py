"""What an installed wheel must do where nothing but torch is installed beside it: `make wheel` runs this with that environment's Python."""

import importlib.util
import subprocess
import sys
from pathlib import Path


def main() -> None:
    import torch

    import foci

    installed = Path(foci.__file__).resolve()
    assert Path(sys.prefix).resolve() in installed.parents, f"foci came from {installed}, not from the wheel"
    assert foci.__version__ not in ("", "0+unknown"), foci.__version__
    for name in ("rich", "typer"):
        assert importlib.util.find_spec(name) is None, f"{name} is installed, so that this shows nothing"

    query, key, value = torch.randn(3, 2, 4, 128, 32, requires_grad=True).unbind(0)
    out = foci.attention(query, key, value, mask=foci.masks.causal())
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(out, expected)
    out.sum().backward()

    for words in ([], ["--help"], ["env"]):
        done = subprocess.run([Path(sys.executable).with_name("foci"), *words], capture_output=True, text=True)
        assert done.returncode == 2, done
        assert done.stdout == "" and "pip install 'foci[cli]'" in done.stderr and "Traceback" not in done.stderr, done
    print(f"foci {foci.__version__} with torch {torch.__version__} alone: import, attention, backward, and the message of the command")


main()
