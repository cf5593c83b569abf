"""Models of random weights: which layers, how many bytes, what is refused before it is made."""

import json

import pytest

from deepinfer.bench import synthetic
from deepinfer.bench.synthetic import Size, model_of, read_size
from deepinfer.errors import CapacityError, UsageError
from deepinfer.model.config import ModelConfig
from deepinfer.settings import resolve


def published():
    config = json.loads(synthetic.PUBLISHED.read_text())
    del config["vision_config"]
    return config


def test_all_layers_are_the_published_model():
    whole = synthetic.slice_config(Size(20, 20, engram=True))
    assert whole == published()
    text = published()["text_config"]
    text["engram_layer_ids"] = []
    assert synthetic.slice_config(Size(20, 20))["text_config"] == text


@pytest.mark.parametrize(
    ("size", "kv", "index", "targets"),
    [
        (Size(1, 1), (0, 1), (0, 1), (1,)),
        (Size(6, 6), (0, 6), (0, 6, 10), (9, 10, 11)),
        (Size(7, 5), (0, 1, 7), (0, 1, 7, 11), (9, 10, 11)),
        (Size(19, 2), (1, 7, 13, 19), (1, 7, 13, 19), (19, 20)),
    ],
)
def test_a_slice_has_its_own_sources_and_the_real_widths(size, kv, index, targets):
    config = model_of(size, True).config
    whole = ModelConfig.from_dict(published())
    assert (config.kv_source_layer_ids, config.index_source_layer_ids) == (kv, index)
    assert config.decoder_start == config.candidate_source_layer_id == size.encoder
    assert config.dspark_target_layer_ids == targets and not config.cut_obstacles
    assert not config.engram_layer_ids and len(config.stages) == 3
    for name in ("hidden_size", "n_routed_experts", "moe_intermediate_size", "vocab_size",
                 "head_dim", "num_attention_heads", "index_topk", "quantization"):  # fmt: skip
        assert getattr(config, name) == getattr(whole, name)


def test_every_slice_is_a_model():
    for encoder in range(1, 21):
        for decoder in (1, 2, 5, 20):
            config = model_of(Size(encoder, decoder), True).config
            assert config.num_hidden_layers == encoder + decoder and not config.cut_obstacles


def test_bytes_are_those_of_the_ledger():
    """Performance ledger §1.1: 7.22 GB of experts and 0.166 GB else a layer."""
    layers = model_of(Size(6, 6), False).weight_bytes - model_of(Size(1, 1), False).weight_bytes
    assert layers / 10 == pytest.approx(7.22e9 + 0.166e9, rel=0.01)
    assert model_of(Size(1, 1), True).weight_bytes > model_of(Size(1, 1), False).weight_bytes


def test_engram_only_where_asked():
    config = model_of(read_size("flash-slice:2+1:engram", "cpu"), False).config
    assert config.engram_layer_ids == (0,)
    assert config.engram_num_embeddings == (384_006_168,)
    assert model_of(Size(6, 1, engram=True), False).config.engram_layer_ids == (0,)
    assert model_of(Size(19, 1, engram=True), False).config.engram_layer_ids == (0, 13)
    token_map = model_of(Size(1, 1, engram=True), False).token_map()
    assert len(token_map) == 129_280 and max(token_map) == 99_091


@pytest.mark.parametrize(
    ("text", "accelerator", "size"),
    [
        ("flash-slice", "cpu", "flash-slice:1+1"),
        ("flash-slice", "nvidia", "flash-slice:6+6"),
        ("flash-slice:3+2", "nvidia", "flash-slice:3+2"),
        ("flash-slice:engram", "cpu", "flash-slice:1+1:engram"),
        ("tiny", "cpu", "tiny"),
    ],
)
def test_sizes_in_words(text, accelerator, size):
    read = read_size(text, accelerator)
    assert str(read) == size and read_size(size, "cpu") == read


@pytest.mark.parametrize(
    "text", ["", "flash", "flash-slice:0+1", "flash-slice:1+21", "flash-slice:1", "tiny:1+1",
             "flash-slice:1+1:engrams", "flash-slice:-1+1"],
)  # fmt: skip
def test_other_words_are_refused_with_those_that_would_do(text):
    with pytest.raises(UsageError) as caught:
        read_size(text, "cpu")
    assert caught.value.code == "synthetic-invalid"
    assert "tiny" in caught.value.facts[0] and caught.value.hint


def test_what_does_not_fit_is_refused_before_a_weight_is_made(monkeypatch):
    from deepinfer.checkpoint import noise
    from deepinfer.engine import assembly

    monkeypatch.setattr(noise, "random_weights", lambda *_: pytest.fail("made"))
    monkeypatch.setattr(assembly, "free_bytes", lambda device: 20 << 30)
    settings = resolve({"accelerator": "cpu"}, environ={})
    with pytest.raises(CapacityError) as caught:
        synthetic.parts(settings, Size(1, 1), print)
    assert caught.value.code == "weights-too-big"
    assert caught.value.message == "--synthetic flash-slice:1+1: the weights do not fit: 23.6 GiB"
    assert caught.value.hint == "--mtp 0, or --synthetic tiny"


def test_tiny_has_the_embedded_sizes_and_its_tokenizer():
    from deepinfer.engine.assembly import embedded_model

    model = model_of(Size(), True)
    data = json.loads((embedded_model() / "config.json").read_text())
    assert model.config == ModelConfig.from_dict(data)
    assert model.tokenizer().encode("def f(x):") and len(model.token_map()) == 4096
    assert model.identity() != model_of(Size(), True, seed=1).identity()


# simulated acceptance


@pytest.mark.parametrize("length", [1.0, 1.5, 3.51, 6.0])
def test_the_chance_gives_the_length(length):
    chance = synthetic.chance_of(length, 5)
    assert sum(chance**j for j in range(6)) == pytest.approx(length)


@pytest.mark.parametrize("length", [0.9, 6.1, float("nan")])
def test_lengths_that_no_step_gives_are_refused(length):
    with pytest.raises(UsageError) as caught:
        synthetic.chance_of(length, 5)
    assert caught.value.code == "accepted-length-impossible"
