"""Build the release and try it as a stranger would: sdist and wheel, empty environments, the demo from the wheel.

``python tools/release.py`` builds quietgrad and quietgrad-verify into dist/, checks names, versions and sizes,
installs the wheels with and without extras into fresh environments of every Python that is here, runs what the
README promises, and writes the bill of materials of a plain install. Nothing is uploaded.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

import sbom
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
CONSTRAINTS = ROOT / "constraints.txt"
PACKER = "zopfli==0.4.3"
LARGEST_WHEEL = 1_260_000  # bytes: nothing but modules, 3.4 MB of them; no data, pictures or tables
SLOWEST_IMPORT = 2.5  # times numpy's
PYTHONS = ("3.11", "3.12", "3.13")
VERIFIER = ROOT / "verifier"
LARGEST_VERIFIER = 60_000  # bytes
NEEDED = (
    "quietgrad/py.typed",
    "quietgrad/assurance/report/page.html.j2",
    "quietgrad/assurance/report/model.html.j2",
    "quietgrad/assurance/report/ledger.html.j2",
    "quietgrad/assurance/certificates/schema.json",
)


def main() -> int:
    """Build, check, install and run."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--build-only", action="store_true", help="build and check the files, install nothing")
    options = arguments.parse_args()
    version = checked_version()
    wheel, sdist = build()
    check_files(wheel, sdist, version)
    verifier = build_verifier(version)
    if not options.build_only:
        for python in pythons():
            for extras in ("", "[report,data,excel,onnx,cluster,logs]"):
                try_it(python, wheel, verifier, extras, version)
            try_verifier(python, verifier, version)
        try_sdist(sdist, version)
        write_bill(wheel, version)
    print(f"release {version}: {wheel.name} ({wheel.stat().st_size >> 10} KiB), {sdist.name}")
    return 0


def pythons() -> list[str]:
    """The interpreters of the versions in PYTHONS that are here, on the path or installed by pyenv."""
    pyenv = Path.home() / ".pyenv" / "versions"
    interpreters = []
    for version in PYTHONS:
        places = [*sorted(pyenv.glob(f"{version}.*/bin/python")), shutil.which(f"python{version}")]
        interpreters += [str(place) for place in places if place][:1]
    if len(interpreters) < len(PYTHONS):
        print(f"tried with {interpreters} alone; the metadata lists {', '.join(PYTHONS)}", flush=True)
    return interpreters


def checked_version() -> str:
    """The version, which the package, the project, the citation and the changelog must agree on."""
    version = str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])
    for file, words in {
        "src/quietgrad/__init__.py": f'__version__ = "{version}"',
        "CITATION.cff": f"version: {version}",
        "CHANGELOG.md": f"## {version} ",
    }.items():
        if words not in (ROOT / file).read_text(encoding="utf-8"):
            raise SystemExit(f"{file}: does not say {words!r}")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition(f"## {version} ")[2]
    if not changes.partition("\n### ")[2].startswith("Guarantees"):
        raise SystemExit("CHANGELOG.md: what changes a guarantee comes first")
    return version


def build() -> tuple[Path, Path]:
    """Both files, made afresh."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT))
    wheel = next(DIST.glob("quietgrad-*.whl"))
    repack(wheel)
    return wheel, next(DIST.glob("quietgrad-*.tar.gz"))


def repack(wheel: Path) -> None:
    """Compress the same files again with zopfli, whose output every unzip reads and which is 3 % smaller."""
    with zipfile.ZipFile(wheel) as archive:
        before = {name: archive.read(name) for name in archive.namelist()}
    smaller = wheel.with_suffix(".smaller")
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "venv", folder)
        its = str(Path(folder) / "bin" / "python")
        run(its, "-m", "pip", "install", "--quiet", PACKER)
        run(its, "-c", _REPACK, str(wheel), str(smaller))
    with zipfile.ZipFile(smaller) as archive:
        if {name: archive.read(name) for name in archive.namelist()} != before:
            raise SystemExit(f"{wheel.name}: other files after packing again")
    smaller.replace(wheel)


def build_verifier(version: str) -> Path:
    """The wheel of quietgrad-verify: its own files, the schema that quietgrad has too, and the same version."""
    run(sys.executable, "-m", "build", "--outdir", str(DIST), str(VERIFIER))
    wheel = next(DIST.glob("quietgrad_verify-*.whl"))
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
        schema = content.read("quietgrad_verify/schema.json")
    ours = ("quietgrad_verify/", f"quietgrad_verify-{version}.dist-info/")
    foreign = [name for name in names if not name.startswith(ours)]
    if foreign or wheel.stat().st_size > LARGEST_VERIFIER or not any(name.endswith("LICENSE") for name in names):
        raise SystemExit(f"{wheel.name}: foreign {foreign[:3]}, {wheel.stat().st_size} bytes, or no licence")
    if schema != (ROOT / "src/quietgrad/assurance/certificates/schema.json").read_bytes():
        raise SystemExit("schema.json: quietgrad and quietgrad-verify have different ones")
    return wheel


def try_verifier(python: str, wheel: Path, version: str) -> None:
    """Install quietgrad-verify alone, without quietgrad, and check claims of real runs of other libraries."""
    claims = ROOT / "benchmarks/results/foreign_claims"
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        run(python, "-m", "venv", str(home / "env"))
        its = home / "env" / "bin"
        run(str(its / "python"), "-m", "pip", "install", "--quiet", str(wheel))
        answer = run(str(its / "python"), "-c", "import quietgrad_verify as v; print(v.__version__)", cwd=home)
        if answer.strip() != version:
            raise SystemExit(f"{python}: quietgrad-verify says {answer!r}")
        command = str(its / "quietgrad-verify")
        run(command, str(claims / "opacus-Poisson_samples.json"), "--html", "v.html", cwd=home)
        refuted = subprocess.run(
            [command, str(claims / "opacus-a_shuffled_loader.json")], cwd=home, capture_output=True
        )
        if refuted.returncode != 1 or not (home / "v.html").exists():
            raise SystemExit(f"{python}: quietgrad-verify ends with {refuted.returncode} for a false ε")
        print(f"{python} quietgrad-verify: alone, one claim proved, one refuted", flush=True)


def check_files(wheel: Path, sdist: Path, version: str) -> None:
    """Small enough, with everything that is read at run time and the licence, and with nothing else's."""
    if wheel.stat().st_size > LARGEST_WHEEL:
        raise SystemExit(f"{wheel.name}: {wheel.stat().st_size} bytes, more than {LARGEST_WHEEL}")
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
    missing = [name for name in NEEDED if name not in names]
    foreign = [name for name in names if not name.startswith(("quietgrad/", f"quietgrad-{version}.dist-info/"))]
    if missing or foreign or not any(name.endswith("LICENSE") for name in names):
        raise SystemExit(f"{wheel.name}: missing {missing}, foreign {foreign[:3]}, or no licence")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    wanted = [
        "LICENSE",
        "README.md",
        "SECURITY.md",
        "CITATION.cff",
        "CHANGELOG.md",
        "changes/0.2.0.md",
        "pyproject.toml",
        "Makefile",
    ]
    if absent := [name for name in wanted if name not in inside]:
        raise SystemExit(f"{sdist.name}: {absent} are missing")


def try_it(python: str, wheel: Path, verifier: Path, extras: str, version: str) -> None:
    """Install into an empty environment and do what a new user does."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        run(python, "-m", "venv", str(home / "env"))
        its = home / "env" / "bin"
        run(str(its / "python"), "-m", "pip", "install", "--quiet", f"{wheel}{extras}")
        if extras:  # the second proof by the verifier, and without extras by dp-accounting
            run(str(its / "python"), "-m", "pip", "install", "--quiet", str(verifier))
        answer = run(str(its / "quietgrad"), "--version", cwd=home)
        if answer.strip() != f"quietgrad {version}":
            raise SystemExit(f"{python}: says {answer!r}")
        run(str(its / "quietgrad"), "demo", "--out", "demo", cwd=home)
        run(str(its / "quietgrad"), "certificate", "demo/default", "-o", "c.json", cwd=home)
        run(str(its / "quietgrad"), "verify", "c.json", cwd=home)
        if not (home / "demo" / "report.html").exists():
            raise SystemExit(f"{python}{extras}: the demo left no report")
        ratio = float(run(str(its / "python"), "-c", _IMPORTS, cwd=home))
        if ratio > SLOWEST_IMPORT:
            raise SystemExit(f"{python}: import quietgrad takes {ratio:.1f} times import numpy")
        print(f"{python} {extras or 'plain'}: demo, report, certificate; import {ratio:.2f} × numpy", flush=True)


def try_sdist(sdist: Path, version: str) -> None:
    """A wheel made from the source distribution alone is the same release, and is imported."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        run(sys.executable, "-m", "venv", str(home / "env"))
        its = home / "env" / "bin"
        run(str(its / "python"), "-m", "pip", "install", "--quiet", "-c", str(CONSTRAINTS), str(sdist))
        answer = run(str(its / "python"), "-c", "import quietgrad; print(quietgrad.__version__)", cwd=home)
        if answer.strip() != version:
            raise SystemExit(f"{sdist.name}: its wheel says {answer!r}")
        print(f"{sdist.name}: builds, installs and is imported", flush=True)


def write_bill(wheel: Path, version: str) -> None:
    """Write the software bill of materials of a plain install with the tested versions, beside the wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    direct = [Requirement(line) for line in project["dependencies"]]
    needed = [each.name for each in direct if each.marker is None or each.marker.evaluate()]
    target = DIST / f"quietgrad-{version}.cdx.json"
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder) / "env" / "bin" / "python"
        # Without pip, which is no part of quietgrad: the bill lists everything in the environment.
        run(sys.executable, "-m", "venv", "--without-pip", str(python.parent.parent))
        pip = (sys.executable, "-m", "pip", "--python", str(python))
        run(*pip, "install", "--quiet", "-c", str(CONSTRAINTS), str(wheel))
        packages = sbom.write(python, ROOT, target, needed)
    print(f"{target.name}: CycloneDX, {packages} packages", flush=True)


# zipfile has no setting for another compressor: this process, which does nothing else, exchanges its own.
_REPACK = """
import sys, zipfile, zopfli.zlib
class Compressor:
    content = b""
    def compress(self, part):
        self.content += part
        return b""
    def flush(self):
        return zopfli.zlib.compress(self.content)[2:-4]  # without what zlib puts around a deflate stream
zipfile._get_compressor = lambda *_: Compressor()
with zipfile.ZipFile(sys.argv[1]) as old, zipfile.ZipFile(sys.argv[2], "w", zipfile.ZIP_DEFLATED) as new:
    for entry in old.infolist():
        new.writestr(entry, old.read(entry))
"""

_IMPORTS = """
import statistics, subprocess, sys, time
def took(what):
    def once():
        start = time.perf_counter(); subprocess.run([sys.executable, '-c', what], check=True)
        return time.perf_counter() - start
    once()
    return [once() for _ in range(7)]
empty = statistics.median(took('pass'))
print((statistics.median(took('import quietgrad')) - empty) / (statistics.median(took('import numpy')) - empty))
"""


def run(*command: str, cwd: Path | None = None) -> str:
    """Run a command; what it says is shown only if it fails."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    raise SystemExit(main())
