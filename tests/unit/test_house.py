"""Laws of the house: imports without effects, one reader of the environment, torch-free rooms."""

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "deepinfer"
FILES = sorted(p for p in PACKAGE.rglob("*.py"))
MODULES = sorted(
    ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for p in FILES
    if p.name != "__main__.py"
)
# Plans, checks and everything before a command runs must work where torch is not installed.
TORCH_FREE = (
    "deepinfer", "deepinfer.errors", "deepinfer.core.request", "deepinfer.core.sequence",
    "deepinfer.core.step", "deepinfer.settings", "deepinfer.device", "deepinfer.toolchain",
    "deepinfer.toolchain.compile", "deepinfer.engine.compiled", "deepinfer.cli.compiling",
    "deepinfer.report.records", "deepinfer.report.replay", "deepinfer.report.heatmap",
    "deepinfer.report.tables", "deepinfer.model.config", "deepinfer.checkpoint.layout",
    "deepinfer.checkpoint.names", "deepinfer.kvcache.blocks", "deepinfer.kvcache.prefix",
    "deepinfer.kvcache.tiers", "deepinfer.scheduler.policy", "deepinfer.replay",
    "deepinfer.model.cost", "deepinfer.speculative", "deepinfer.speculative.timing",
    "deepinfer.speculative.trace", "deepinfer.speculative.tracefile",
    "deepinfer.speculative.reschedule", "deepinfer.speculative.acceptance",
    "deepinfer.speculative.temperatures", "deepinfer.report.trace_views",
    "deepinfer.report.figures", "deepinfer.report.bench", "deepinfer.report.bench_plots",
    "deepinfer.report.bench_compare", "deepinfer.report.bench_bars",
    "deepinfer.structured.grammar", "deepinfer.tokenizer.tokenizer",
    "deepinfer.cli.main", "deepinfer.cli.checks",
    "deepinfer.bench.axes", "deepinfer.bench.metrics", "deepinfer.bench.files",
    "deepinfer.bench.savings", "deepinfer.bench.synthetic",
    "deepinfer.protocol.answers", "deepinfer.protocol.batchfile", "deepinfer.protocol.completions",
    "deepinfer.engine.exchange",
)  # fmt: skip


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def trees():
    return [(path.relative_to(ROOT), ast.parse(path.read_text())) for path in FILES]


def test_the_environment_is_read_in_one_file():
    readers = set()
    for path, tree in trees():
        for node in ast.walk(tree):
            name = node.attr if isinstance(node, ast.Attribute) else None
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                readers |= {str(path) for a in node.names if a.name in ("environ", "getenv")}
            if name in ("environ", "environb", "getenv", "putenv"):
                owner = node.value
                if isinstance(owner, ast.Name) and owner.id == "os":
                    readers.add(str(path))
    assert readers == {"deepinfer/settings/registry.py"}


def test_importing_everything_is_silent_and_touches_no_device():
    code = f"""
import importlib, os, random, signal, sys
before = dict(os.environ)
state, interrupt = random.getstate(), signal.getsignal(signal.SIGINT)
for name in {MODULES!r}:
    importlib.import_module(name)
assert dict(os.environ) == before, "the environment was written"
assert random.getstate() == state, "a generator was seeded"
assert signal.getsignal(signal.SIGINT) is interrupt, "a signal handler was set"
import logging, torch
assert not logging.getLogger().handlers, "logging was configured"
assert not torch.cuda.is_initialized(), "a device was touched"
"""
    done = python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), done.stderr


@pytest.mark.parametrize("module", TORCH_FREE)
def test_torch_free_modules(module):
    if module not in MODULES:
        pytest.skip(f"{module} is not here")
    code = f"""
import importlib, json, sys
importlib.import_module({module!r})
print(json.dumps([n for n in ("torch", "numpy", "pandas", "matplotlib") if n in sys.modules]))
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout)
    assert "torch" not in loaded
    if not module.startswith(("deepinfer.checkpoint", "deepinfer.scheduler")):
        assert loaded == []


def test_only_the_command_line_sees_typer_and_rich():
    for path, tree in trees():
        if path.parts[1] == "cli" or path.name == "termview.py":
            continue
        for name in imported(tree):
            assert name.split(".")[0] not in ("typer", "rich", "click"), path


def test_nobody_imports_click_or_configures_at_import():
    for path, tree in trees():
        assert "click" not in {name.split(".")[0] for name in imported(tree)}, path


def imported(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def test_public_faces_are_small():
    for path in PACKAGE.rglob("__init__.py"):
        assert len(path.read_text().splitlines()) <= 40, path


def test_every_module_says_what_it_is():
    for path, tree in trees():
        assert ast.get_docstring(tree), path


def test_no_vague_names():
    for path in [*FILES, *(ROOT / "kernels").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        assert path.stem not in ("utils", "util", "common", "misc", "helpers"), path


def test_users_never_see_an_assert():
    for path, tree in trees():
        if path.parts[1] in ("cli", "settings", "checkpoint", "protocol"):
            for node in ast.walk(tree):
                assert not isinstance(node, ast.Assert), f"{path}:{getattr(node, 'lineno', 0)}"


def test_no_module_level_context():
    """A name set to None at import time is a value somebody will rebind later."""
    for path, tree in trees():
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                names = [t.id for t in node.targets if isinstance(t, ast.Name)]
                assert not (node.value.value is None and names), f"{path}: {names}"


def test_print_stays_in_the_command_line():
    for path, tree in trees():
        if path.parts[1] == "cli" or path.name == "__main__.py":
            continue
        for node in ast.walk(tree):
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            assert not (called and node.func.id == "print"), f"{path}:{node.lineno}"


def test_public_names_are_lazy_and_complete():
    import deepinfer

    for name in deepinfer.__all__:
        assert getattr(deepinfer, name) is not None
        assert name in dir(deepinfer)
    with pytest.raises(AttributeError):
        _ = deepinfer.nothing


def test_metadata():
    meta = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = meta["project"]
    assert project["name"] == "deepinfer-toolkit"
    assert project["requires-python"] == ">=3.11"
    needed = {line.split(">")[0].split("<")[0] for line in project["dependencies"]}
    assert needed == {
        "torch", "numpy", "safetensors", "llguidance", "tokenizers", "typer", "rich", "pandas",
        "matplotlib", "deepseek-recipe",
    }  # fmt: skip
    extras = project["optional-dependencies"]
    # torch-npu beside a torch of another kind breaks `import torch`: never in what tests install.
    assert not any("npu" in line or "ascend" in line for line in extras["dev"])
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:200]


def test_build_script_stays_a_bootstrap():
    lines = (ROOT / "build.sh").read_text().splitlines()
    assert len(lines) <= 40
    assert (ROOT / "build.sh").stat().st_mode & 0o111
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_kernels_install_below_the_package():
    """From a checkout `import kernels` would also work, and belongs to another distribution."""
    for path in [*FILES, *(ROOT / "tests").rglob("*.py")]:
        assert not {"kernels"} & {n.split(".")[0] for n in imported(ast.parse(path.read_text()))}


def test_settings_table_in_readme_is_in_sync():
    from deepinfer.settings import table

    text = (ROOT / "README.md").read_text()
    between = text.split(table.BEGIN)[1].split(table.END)[0].strip()
    assert between == table.markdown()


def test_fields_of_requests_in_readme_are_in_sync():
    from deepinfer.protocol import fields

    assert fields.markdown() in (ROOT / "README.md").read_text()


def test_readme_tree_names_every_room():
    text = (ROOT / "README.md").read_text()
    rooms = {p.name for p in PACKAGE.iterdir() if p.is_dir() and list(p.glob("*.py"))}
    for room in sorted(rooms):
        assert f"  {room}/" in text, room
