"""Names of Triton and Gluon that are not public, and what foci does where they are missing. What kernels become without them:
`tests/backends/hopper/test_forward_compile.py` and `tests/backends/triton_backend/test_triton_compiling.py`."""

# NOW-03

import base64
import hashlib
import importlib.metadata
import os
import subprocess
import sys

import pytest
from without import load_without

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")

from foci.compat import gluon, lookup
from foci.compat import triton as compat


def test_the_installed_triton_has_every_name():
    assert compat.async_compile_mode().get() is None
    assert gluon.CallerContext(num_warps=4) is not None
    assert gluon.HAS_ADD and callable(gluon.begin_add)
    missing = [name for path, name in lookup.NAMES.items() if path.startswith("triton.") and not name.is_found]
    assert missing == []


def test_without_them_there_is_a_way_or_none_is_taken(monkeypatch):
    public = load_without("gluon", "triton.*")
    assert public.CallerContext is None
    # Triton 3.6 and 3.7 have no public name for the copy that adds
    assert public.HAS_ADD is (compat.release() > (3, 7))
    monkeypatch.setattr(lookup, "_patterns", ["triton.*"])
    assert compat.async_compile_mode.__wrapped__() is None


@pytest.mark.parametrize("name", ["reinterpret", "_reinterpret"])
def test_a_buffer_is_viewed_by_the_method_it_has(name):
    buffer = type("Buffer", (), {name: lambda self, *args: args})()
    assert gluon.reinterpreted(buffer)(1, 2) == (1, 2)


def test_a_buffer_is_viewed_by_the_public_method_if_it_has_both():
    buffer = type("Buffer", (), {"reinterpret": lambda self: "public", "_reinterpret": lambda self: "private"})()
    assert gluon.reinterpreted(buffer)() == "public"


DIGEST = """
from triton.runtime import cache
from foci.compat.triton import digest_triton
assert cache.triton_key.cache_info().currsize == 0
made = digest_triton()
assert cache.triton_key.cache_info().currsize == 0, "it read the library"
assert made == cache.triton_key()
"""


def test_the_digest_of_tritons_files_is_tritons_own_without_reading_its_library():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", DIGEST], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A function that installs a wheel of Triton with a library of eight bytes, and gives the library's path."""

    def install(size=8, record=True):
        library, info = tmp_path / "triton" / "_C" / "libtriton.so", tmp_path / "triton-3.6.0.dist-info"
        library.parent.mkdir(parents=True)
        library.write_bytes(b"compiler")
        info.mkdir()
        (info / "METADATA").write_text("Name: triton\nVersion: 3.6.0\n")
        digest = base64.urlsafe_b64encode(hashlib.sha256(b"compiler").digest()).decode().rstrip("=")
        if record:
            (info / "RECORD").write_text(f"triton/_C/libtriton.so,sha256={digest},{size}\ntriton-3.6.0.dist-info/RECORD,,\n")
        monkeypatch.setattr(compat, "distribution", lambda name: importlib.metadata.Distribution.at(info))
        monkeypatch.setattr("triton.__file__", str(tmp_path / "triton" / "__init__.py"))
        return library

    return install


def test_a_wheel_records_its_library(wheel):
    wheel()
    assert compat._recorded_library() == hashlib.sha256(b"compiler").hexdigest()


@pytest.mark.parametrize("options", [{"record": False}, {"size": 9}], ids=["no record", "another size"])
def test_a_library_is_read_if_the_record_is_not_of_it(wheel, options):
    wheel(**options)
    assert compat._recorded_library() is None


def test_a_library_is_read_if_it_was_written_after_the_record(wheel):
    library = wheel()
    later = (library.parents[2] / "triton-3.6.0.dist-info" / "RECORD").stat().st_mtime_ns + 1
    os.utime(library, ns=(later, later))
    assert compat._recorded_library() is None


def test_a_library_is_read_if_the_record_is_of_another_installation(wheel, monkeypatch, tmp_path):
    library = wheel()
    other = tmp_path / "other" / "_C"
    other.mkdir(parents=True)
    (other / library.name).write_bytes(b"compiler")
    monkeypatch.setattr("triton.__file__", str(other.parent / "__init__.py"))
    assert compat._recorded_library() is None


@pytest.mark.parametrize("error", [None, ValueError("another format")])
def test_triton_computes_the_digest_where_the_record_does_not_help(error, monkeypatch):
    def recorded():
        if error:
            raise error

    monkeypatch.setattr(compat, "_recorded_library", recorded)
    monkeypatch.setattr("triton.runtime.cache.triton_key", lambda: "Triton's")
    assert compat.digest_triton.__wrapped__() == "Triton's"
