"""Finding the mirror, trusting the source package, building on from where an attempt stopped."""

import hashlib
import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from runtime.setup import debian, headers
from runtime.setup.cache import Cache
from tests.fakes_setup import FakeWorkshop, program

ONE_LINE = """\
# deb http://commented.example/debian bookworm main
deb https://packages.example/apt other main
deb [arch=amd64 signed-by=/usr/share/keyrings/x.gpg] http://mirror.example/debian/ bookworm main
"""
DEB822 = """\
Types: deb
URIs: http://off.example/debian
Suites: trixie
Enabled: no

# URIs: http://commented.example/debian
Types: deb deb-src
URIs: http://security.example/debian-security
  http://mirror.example/debian
Suites: trixie trixie-updates
Components: main
"""


@pytest.mark.parametrize(
    ("name", "text", "mirror"),
    [
        ("a.list", ONE_LINE, "http://mirror.example/debian"),
        ("debian.sources", DEB822, "http://mirror.example/debian"),
        ("a.list", "", "http://deb.debian.org/debian"),
        ("a.list", "deb cdrom:[Debian]/ trixie main\n", "http://deb.debian.org/debian"),
        ("a.sources", "URIs: http://archive.ubuntu.com/ubuntu\n", "http://deb.debian.org/debian"),
    ],
)
def test_the_mirror_is_the_one_that_the_machine_uses(
    tmp_path: Path, name: str, text: str, mirror: str
) -> None:
    path = tmp_path / "sources.list.d" / name
    path.parent.mkdir()
    path.write_text(text)
    (path.parent / "note.txt").write_text("deb http://not-read.example/debian trixie main")
    assert debian.archive_mirror(debian.sources_files(tmp_path)) == mirror


def test_sources_list_itself_is_read_first(tmp_path: Path) -> None:
    (tmp_path / "sources.list").write_text(ONE_LINE)
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d" / "z.sources").write_text("URIs: http://late.example/debian")
    files = debian.sources_files(tmp_path)
    assert [path.name for path in files] == ["sources.list", "z.sources"]
    assert debian.archive_mirror(files) == "http://mirror.example/debian"


def test_checksums_are_those_of_sha256() -> None:
    dsc = (
        "Format: 3.0\nChecksums-Sha1:\n aaaa 1 x.tar.xz\nChecksums-Sha256:\n bbbb 1 x.tar.xz\n"
        " cccc 2 y.debian.tar.xz\nFiles:\n dddd 1 x.tar.xz\n"
    )
    assert debian.checksums(dsc) == {"x.tar.xz": "bbbb", "y.debian.tar.xz": "cccc"}
    assert debian.checksums("Format: 3.0\n") == {}


def test_the_interpreter_in_a_folder_is_named_for_its_minor_version() -> None:
    assert debian.executable(Path("/c/python-3.13.5t")) == Path("/c/python-3.13.5t/bin/python3.13t")


class Machine(FakeWorkshop):
    """Plays apt-get, configure and make, as far as files go."""

    failures: int = 0  # of make, before it succeeds
    failing: str = ""  # a word of the command that fails

    def steps(self) -> list[str]:
        """The programs that ran, in short."""
        names = {"./configure": "configure", "-j": "make", "install": "install", "source": "fetch"}
        found = [
            next((short for mark, short in names.items() if word.startswith(mark)), "")
            for command in self.commands
            for word in command
        ]
        return [name for name in found if name]

    def act(self, command: Sequence[str]) -> bool:
        if self.failing in command:
            return False
        if "source" in command:
            source_package(self.cache.folder("build"))
        if command[-1].startswith("-j") and self.failures:
            self.failures -= 1
            return False
        if command[-1].startswith("DESTDIR="):
            root = self.cache.root
            stage = Path(command[-1].removeprefix("DESTDIR=") + f"{root}/python-3.13.5t")
            program(stage / "bin" / "python3.13t", "true")
        return True


def source_package(folder: Path) -> None:
    """What apt-get leaves: a tarball and a .dsc that vouches for it."""
    tarball = folder / "python3.13_3.13.5.orig.tar.xz"
    with tarfile.open(tarball, "w:xz") as archive:
        entry = tarfile.TarInfo("Python-3.13.5/configure")
        entry.size = 4
        archive.addfile(entry, io.BytesIO(b"true"))
    digest = hashlib.sha256(tarball.read_bytes()).hexdigest()
    dsc = f"Checksums-Sha256:\n {digest} 1 {tarball.name}\n"
    (folder / "python3.13_3.13.5-2.dsc").write_text(dsc)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    for name in ("apt-get", "cc", "make"):
        program(tmp_path / "bin" / name, "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return Machine(Cache(tmp_path / "cache"))


def test_a_build_ends_with_the_folder_and_no_leftovers(machine: Machine) -> None:
    folder = debian.build(machine)
    assert folder == machine.cache.root / "python-3.13.5t"
    assert debian.executable(folder).is_file()
    assert machine.steps() == ["fetch", "configure", "make", "install"]
    assert not (machine.cache.root / "build").exists()


def test_a_failed_build_says_where_to_look_and_keeps_its_work(machine: Machine) -> None:
    machine.failures = 1
    with pytest.raises(debian.CannotBuild, match="it did not work(.|\n)*python-make.log"):
        debian.build(machine)
    assert not (machine.cache.root / "python-3.13.5t").exists()
    machine.commands.clear()
    debian.build(machine)
    assert machine.steps() == ["make", "install"]


def test_a_resumed_build_that_fails_starts_over_once(machine: Machine) -> None:
    machine.failures = 1
    with pytest.raises(debian.CannotBuild):
        debian.build(machine)
    machine.commands.clear()
    machine.failures = 1
    debian.build(machine)
    assert machine.steps() == ["make", "configure", "make", "install"]


def test_a_damaged_tarball_is_fetched_again(machine: Machine) -> None:
    folder = machine.cache.folder("build")
    source_package(folder)
    (folder / "python3.13_3.13.5.orig.tar.xz").write_bytes(b"cut off")
    debian.build(machine)
    assert machine.steps()[0] == "fetch"


@pytest.mark.parametrize(("name", "part"), [("apt-get", "no apt-get"), ("cc", "apt install gcc")])
def test_a_missing_program_is_named(machine: Machine, tmp_path: Path, name: str, part: str) -> None:
    (tmp_path / "bin" / name).unlink()
    with pytest.raises(debian.CannotBuild, match=part):
        debian.build(machine)


def test_missing_headers_are_named_by_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "cc", "! grep -q -e '<zlib.h' -e '<ffi.h'")
    program(tmp_path / "make", "true")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert headers.missing_packages() == ["zlib1g-dev", "libffi-dev"]


def test_headers_that_cannot_be_fetched_are_a_line_to_type(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headers, "missing_packages", lambda: ["libssl-dev", "zlib1g-dev"])
    machine.failing = "download"
    with pytest.raises(debian.CannotBuild, match="apt install libssl-dev zlib1g-dev"):
        debian.build(machine)
