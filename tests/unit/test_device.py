"""Detection from fake device trees: never raises, prefers what is there, names what is not."""

import pytest

from deepinfer.device import detect
from deepinfer.errors import EnvironmentProblem


def tree(root, *nodes, meminfo="MemTotal: 4096 kB\nMemAvailable: 1024 kB\n", cpuinfo=""):
    (root / "dev").mkdir()
    (root / "proc").mkdir()
    for node in nodes:
        (root / "dev" / node).touch()
    (root / "proc" / "meminfo").write_text(meminfo)
    (root / "proc" / "cpuinfo").write_text(cpuinfo)
    return root


def test_nothing_at_all_is_a_cpu(tmp_path):
    found = detect.find(tmp_path / "nowhere", query=False)
    assert found.devices == () and found.accelerators == ("cpu",)
    assert found.cpu.cores >= 1 and found.cpu.memory_bytes is None


def test_nodes_of_both_vendors(tmp_path):
    root = tree(tmp_path, "nvidia0", "nvidia1", "nvidiactl", "davinci0", "davinci_manager")
    found = detect.find(root, query=False)
    assert [d.accelerator for d in found.devices] == ["nvidia", "nvidia", "ascend"]
    assert found.accelerators == ("nvidia", "ascend", "cpu")


def test_host_facts(tmp_path):
    info = "model name : Some CPU\nflags : fpu avx2 avx512f\n\nmodel name : Other\nflags : none\n"
    cpu = detect.find(tree(tmp_path, cpuinfo=info), query=False).cpu
    assert cpu.name == "Some CPU" and cpu.flags == ("avx2", "avx512f")
    assert (cpu.memory_bytes, cpu.free_bytes) == (4096 * 1024, 1024 * 1024)


def test_pick_prefers_what_torch_can_use(monkeypatch):
    monkeypatch.setattr(detect, "_usable", lambda module: module == "npu")
    assert detect.pick("auto") == "ascend"
    assert detect.pick("ascend") == "ascend"
    assert detect.pick("cpu") == "cpu"
    monkeypatch.setattr(detect, "_usable", lambda module: False)
    assert detect.pick("auto") == "cpu"


@pytest.mark.parametrize(("kind", "word"), [("ascend", "NPU"), ("nvidia", "NVIDIA GPU")])
def test_an_accelerator_asked_for_and_absent(kind, word, monkeypatch):
    monkeypatch.setattr(detect, "_usable", lambda module: False)
    bare = detect.Found((), detect.find(query=False).cpu)
    monkeypatch.setattr(detect, "find", lambda query=True: bare)
    with pytest.raises(EnvironmentProblem) as caught:
        detect.pick(kind, "DEEPINFER_ACCELERATOR")
    error = caught.value
    assert error.code == "accelerator-unavailable" and error.exit_status == 3
    assert error.message == f"--accelerator {kind} was asked for, but no {word} was found"
    assert error.facts[0].startswith("no device node; ")
    assert error.facts[1] == "from DEEPINFER_ACCELERATOR"
    assert error.hint == "deepinfer doctor"


def test_a_device_that_torch_cannot_use(monkeypatch):
    monkeypatch.setattr(detect, "_usable", lambda module: False)
    here = detect.Found((detect.Device("nvidia"),), detect.find(query=False).cpu)
    monkeypatch.setattr(detect, "find", lambda query=True: here)
    with pytest.raises(EnvironmentProblem, match="but torch cannot use it"):
        detect.pick("nvidia")
