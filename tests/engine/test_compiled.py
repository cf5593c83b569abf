"""Which compiled kernels an engine takes: fresh ones at a level that is there, else torch."""

from __future__ import annotations

import json

import pytest
import torch

from deepinfer import LLM, SamplingParams
from deepinfer.cli.main import main
from deepinfer.core.request import Structured
from deepinfer.engine.assembly import assemble
from deepinfer.engine.compiled import open_compiled
from deepinfer.errors import EnvironmentProblem, UsageError
from deepinfer.ops.cpu.library import LEVELS
from deepinfer.settings import resolve
from deepinfer.toolchain import built, plan
from tests import native, t6

NOT_BUILT = (
    "the compiled cpu kernels are not built: deepinfer build --accelerator cpu, "
    "or --backend all=torch"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return t6.write(tmp_path_factory.mktemp("t6") / "m", quantised=True)


@pytest.fixture
def library():
    native.library_path()
    return str(native.BUILD_DIR)


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """A library that is no library."""
    file = tmp_path / "broken.so"
    file.write_text("not a library")
    here = built.Built("fresh", file, "0", LEVELS, "g++")
    monkeypatch.setattr(built, "find", lambda build_dir: here)


def opened(build_dir, **settings):
    return open_compiled(resolve({"build_dir": str(build_dir), **settings}, environ={}), "cpu")


def lines(build_dir, **settings):
    return opened(build_dir, **settings).warnings


def parts(model, build_dir, **settings):
    small = dict(accelerator="cpu", max_num_seqs=2, kv_cache_tokens=512, page_tokens=128)
    return assemble(
        resolve({"model_dir": str(model), "build_dir": str(build_dir), **small, **settings}, {}),
        lambda line: None,
    )


def chosen(ops):
    """Where the op that every back end holds comes from."""
    return ops.rmsnorm.__module__.split(".")[2]


def test_the_levels_are_those_that_are_compiled():
    assert tuple(plan.LEVELS) == LEVELS


def test_nothing_built_is_one_line_and_torch_serves(model, tmp_path):
    made = parts(model, tmp_path)
    assert [line for line in made.warnings if "compiled" in line] == [NOT_BUILT]
    assert chosen(made.runner.ops) == "torch"
    assert made.settings["DEEPINFER_CPU_LEVEL"]["value"] is None


@pytest.mark.parametrize(
    "settings", [{"backend": "all=torch"}, {"dtype": "fp32"}, {"backend": "all=torch,moe=torch"}]
)
def test_no_line_where_torch_was_asked_for(tmp_path, settings):
    assert lines(tmp_path, **settings) == ()


def test_one_op_on_torch_still_wants_the_others(tmp_path):
    assert lines(tmp_path, backend="moe=torch") == (NOT_BUILT,)


def test_nothing_is_looked_for_on_other_devices(tmp_path):
    assert open_compiled(resolve({"build_dir": str(tmp_path)}, environ={}), "cuda").warnings == ()


def test_no_folder_at_all():
    assert open_compiled(resolve({}, environ={}), "cpu").warnings == (NOT_BUILT,)


def test_other_sources(tmp_path):
    other = built.folder(tmp_path) / "0123456789abcdef"
    other.mkdir(parents=True)
    (other / "manifest.json").write_text("{}")
    assert lines(tmp_path) == (NOT_BUILT.replace("not built", "built from other sources"),)


@pytest.mark.parametrize(
    "settings", [{"backend": "all=cpu"}, {"backend": "rmsnorm=cpu"}, {"cpu_level": "portable"}]
)
def test_asked_for_by_name_it_must_be_there(tmp_path, settings):
    with pytest.raises(EnvironmentProblem) as caught:
        opened(tmp_path, **settings)
    assert (caught.value.code, caught.value.exit_status) == ("extension-not-built", 3)
    assert caught.value.hint.startswith("deepinfer build --accelerator cpu")


def test_the_command_line_ends_with_3_before_a_weight_is_read(model, tmp_path, capsys):
    asked = ["run", "-p", "x", "-m", str(model), "--accelerator", "cpu", "--backend", "all=cpu",
             "--build-dir", str(tmp_path)]  # fmt: skip
    for more in ([], ["--dry-run"]):
        assert main([*asked, *more, "--json"]) == 3
        assert json.loads(capsys.readouterr().out)["error"]["code"] == "extension-not-built"


def test_a_library_that_cannot_be_loaded(tmp_path, broken):
    [line] = lines(tmp_path)
    assert "cannot be loaded" in line and "deepinfer build --accelerator cpu --clean" in line
    with pytest.raises(EnvironmentProblem, match="cannot be loaded"):
        opened(tmp_path, backend="all=cpu")


def test_a_fresh_library_serves_at_the_best_level(model, library):
    made = parts(model, library)
    assert not [line for line in made.warnings if "compiled" in line]
    assert chosen(made.runner.ops) == "cpu"
    entry = made.settings["DEEPINFER_CPU_LEVEL"]
    assert entry["value"] in LEVELS and entry["source"] == "default"
    assert made.settings["DEEPINFER_THREADS"]["value"] == torch.get_num_threads()
    assert chosen(parts(model, library, backend="all=torch").runner.ops) == "torch"


def test_a_level_of_the_user_s_choice(model, library):
    made = parts(model, library, cpu_level="portable")
    assert chosen(made.runner.ops) == "cpu"
    assert made.settings["DEEPINFER_CPU_LEVEL"]["value"] == "portable"
    best = LEVELS.index(opened(library).level)
    if best + 1 < len(LEVELS):
        with pytest.raises(UsageError) as caught:
            opened(library, cpu_level=LEVELS[best + 1])
        assert caught.value.code == "level-unavailable"


def test_a_level_that_was_not_built(library, monkeypatch):
    whole = built.find(library)
    some = built.Built("fresh", whole.path, whole.sources, ("portable",), whole.compiler)
    monkeypatch.setattr(built, "find", lambda build_dir: some)
    assert opened(library).level == "portable", "the best that is there"
    above = next((x for x in LEVELS[1 : LEVELS.index(opened_best(whole)) + 1]), None)
    if above is not None:
        with pytest.raises(EnvironmentProblem, match=f"built without {above}"):
            opened(library, cpu_level=above)
    none = built.Built("fresh", whole.path, whole.sources, (), whole.compiler)
    monkeypatch.setattr(built, "find", lambda build_dir: none)
    [line] = lines(library)
    assert "the compiled cpu kernels are built without" in line


def opened_best(here):
    from deepinfer.ops.cpu.library import Library

    return Library(here.path).level


def test_kept_state_belongs_to_a_level_and_its_sources(model, library, tmp_path, monkeypatch):
    kept = dict(prefix_cache_dir=str(tmp_path / "kept"))

    def identity(build_dir, **settings):
        return parts(model, build_dir, **kept, **settings).reuse.identity

    seen = [identity(tmp_path), identity(library, backend="all=torch")]
    seen += [identity(library, cpu_level="portable")]
    assert seen[0] == seen[1] != seen[2]
    if opened(library).level != "portable":
        assert identity(library) not in seen
    whole = built.find(library)
    other = built.Built("fresh", whole.path, "other", whole.levels, whole.compiler)
    monkeypatch.setattr(built, "find", lambda build_dir: other)
    assert identity(library, cpu_level="portable") not in seen


def test_one_setting_for_the_threads_of_both(model, library, monkeypatch):
    from deepinfer.ops.cpu import library as binding

    told, before = [], torch.get_num_threads()
    real = binding.Library.__init__

    def noted(self, path, level=None, threads=None):
        real(self, path, level, threads)
        told.append(torch.get_num_threads() if threads is None else threads)

    monkeypatch.setattr(binding.Library, "__init__", noted)
    try:
        made = parts(model, library, threads=3)
        assert torch.get_num_threads() == 3 and set(told) == {3}
        assert made.settings["DEEPINFER_THREADS"] == {
            "value": 3, "source": "argument", "origin": "threads",
        }  # fmt: skip
    finally:
        torch.set_num_threads(before)
        real(binding.Library.__new__(binding.Library), built.find(library).path)


@pytest.mark.parametrize(
    ("rule", "kind", "graph"),
    [
        ("off", {"temperature": 0.0}, "step"),
        ("off", {"temperature": 0.9, "top_k": 5, "top_p": 0.8, "min_p": 0.01}, "step"),
        ("off", {"temperature": 0.7, "presence_penalty": 0.5}, "rows"),  # the host is needed
        ("coupled", {"temperature": 0.0, "logprobs": 2}, "rows"),
        ("coupled", {"temperature": 1.0}, "step"),
        ("rejection", {"temperature": 1.0}, "draft"),
    ],
)
def test_captured_steps_change_no_bit(model, library, rule, kind, graph):
    """Requests that come, grow by pages, change their number and end, on an engine that keeps
    graphs and on one that does not."""
    drafts = {"mtp": 0} if rule == "off" else {"mtp": 5, "verify": rule}
    texts = [[11 + (start * 7 + at * at) % 256 for at in range(3 + start)] for start in range(3)]
    asked = [SamplingParams(max_tokens=8 + 14 * at, ignore_eos=True, seed=at, **kind)
             for at in range(3)]  # fmt: skip
    found = []
    for graphs in (True, False):
        with LLM(model, accelerator="cpu", max_num_seqs=3, page_tokens=8, kv_cache_tokens=512,
                 build_dir=library, **drafts) as llm:  # fmt: skip
            ops = llm.parts.runner.ops
            if not graphs:
                ops.graphs = None
            results = llm.generate(texts, asked)
            found.append([(r.token_ids, r.logprobs, r.text) for r in results])
            if graphs:
                kept = {key[0][0] for key, one in ops.graphs._kept.items()
                        if getattr(one, "confirmed", False)}  # fmt: skip
    assert found[0] == found[1]
    assert graph in kept


@pytest.mark.parametrize(
    ("drafts", "temperature", "after", "graphs"),
    [
        (0, 0.0, (), {"step"}), (0, 1.0, (), {"step"}), (5, 1.0, (), {"step", "block"}),
        (0, 1.0, (4000,), {"step"}), (5, 1.0, (4000,), {"step", "block"}),  # never held
    ],
)  # fmt: skip
def test_captured_steps_under_a_grammar(library, drafts, temperature, after, graphs):
    """Masks are what a graph is launched with; a request beside them has none."""
    schema = {"type": "array", "items": {"enum": ["north", "south"]}, "minItems": 9, "maxItems": 9}
    grammar = Structured("json_schema", json.dumps(schema), after)
    held = SamplingParams(max_tokens=40, temperature=temperature, seed=4, structured=grammar)
    asked = [held, SamplingParams(max_tokens=40, temperature=temperature, seed=5), held]
    rule, found = {"verify": "coupled"} if drafts else {}, []
    for kept in (True, False):
        with LLM(accelerator="cpu", build_dir=library, mtp=drafts, **rule) as llm:
            ops = llm.parts.runner.ops
            if not kept:
                ops.graphs = None
            results = llm.generate(["Where?", "One two three", "And then?"], asked)
            found.append([(r.token_ids, r.finish_reason) for r in results])
            if kept:
                names = {key[0][0] for key, one in ops.graphs._kept.items()
                         if getattr(one, "confirmed", False)}  # fmt: skip
    assert found[0] == found[1]
    assert graphs <= names


def test_captured_steps_belong_to_their_engine(model, library):
    """Two engines over one model, one behind the other: a graph of the first knows its memory."""
    made = parts(model, library)
    texts, asked = [[11, 12, 13], [21, 22]], SamplingParams(max_tokens=12, temperature=0)
    found = []
    for _ in range(3):
        with LLM.from_parts(made) as llm:
            found.append([r.token_ids for r in llm.generate(texts, asked)])
    assert found[0] == found[1] == found[2]


def test_every_level_compiles_without_a_warning(library):
    made = native.made()
    logs = [step.output.with_suffix(".log") for step in made.steps]
    assert [log.read_text() for log in logs if log.exists()] == []
