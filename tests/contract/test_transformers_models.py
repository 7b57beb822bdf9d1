"""Models of `transformers` as their users would wrap them: small configurations of what reads texts, images
and sounds, in float32, in bfloat16 and under autocast. Every call is served, with the results of a model."""

import pytest
import torch

from contract.steps import reasons
from ostinato.graphs import graphed

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {**SMALL, "vocab_size": 100}
IMAGE = {**SMALL, "image_size": 32, "patch_size": 8}
GROUPED = {**TEXT, "num_key_value_heads": 2}
MODELS = {
    "Bert": TEXT,
    "DebertaV2": {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "ModernBert": {**TEXT, "pad_token_id": 0},
    "T5Encoder": {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    "GPT2LMHead": {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "Gemma2": {**GROUPED, "head_dim": 8},
    "Mixtral": {**GROUPED, "num_local_experts": 4},
    "Mamba": {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "ViT": IMAGE,
    "Swin": {"image_size": 32, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
    "ConvNext": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
    "ResNet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    "Wav2Vec2": {
        **SMALL,
        "conv_dim": (8, 8),
        "conv_stride": (5, 2),
        "conv_kernel": (10, 3),
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 2,
    },
}
IMAGES, SOUNDS, DECODERS = (
    ("ViT", "Swin", "ConvNext", "ResNet"),
    ("Wav2Vec2",),
    ("GPT2LMHead", "Gemma2", "Mixtral"),
)
FAST = [("Bert", "float32"), ("Mixtral", "bfloat16"), ("ViT", "autocast")]
EVERY = [(name, kind) for name in MODELS for kind in ("float32", "bfloat16", "autocast")]


def config_of(name):
    known = {"T5Encoder": "T5", "GPT2LMHead": "GPT2"}.get(name, name)
    return getattr(transformers, f"{known}Config")(**MODELS[name])


def inputs_of(name, rows, device, dtype):
    generator = torch.Generator().manual_seed(rows)
    if name in IMAGES:
        return {"pixel_values": torch.randn(rows, 3, 32, 32, generator=generator).to(device, dtype)}
    if name in SOUNDS:
        return {"input_values": torch.randn(rows, 400, generator=generator).to(device, dtype)}
    ids = torch.randint(5, 90, (rows, 10), generator=generator).to(device)
    return {"input_ids": ids, "use_cache": False} if name in (*DECODERS, "Mamba") else {"input_ids": ids}


def sizes_are_read_by_the_host(device, name, kind):
    """Torch multiplies by experts' matrices on a GPU from a list of sizes on the host, except in bfloat16."""
    return device.type == "cuda" and name == "Mixtral" and kind != "bfloat16"


@pytest.mark.parametrize(
    ("name", "kind"),
    [pytest.param(*each, marks=() if each in FAST else pytest.mark.slow) for each in EVERY],
)
def test_a_model_is_served_whatever_it_reads(device, name, kind):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    model = getattr(transformers, f"{name}Model")(config_of(name)).eval().to(device, dtype)
    served = graphed(model, ladder=[1, 2, 4])
    batches = [inputs_of(name, rows, device, dtype) for rows in (3, 1, 2, 4, 3)]
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=kind == "autocast"):
        for batch in batches:
            found = served(**batch)[0].clone().float()
            expected = model(**batch)[0].float()
            assert found.shape == expected.shape
            assert float((found - expected).norm() / expected.norm()) < (1e-4 if kind == "float32" else 3e-2)
    found = reasons(served), served.report().replays
    if sizes_are_read_by_the_host(device, name, kind):
        assert found == ({"capture-failed": len(batches)}, 0)
    else:
        assert found == ({}, len(batches))
