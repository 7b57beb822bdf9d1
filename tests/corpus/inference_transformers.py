"""Models of `transformers` from tiny configurations."""

import torch
from torch import nn

from corpus.registry import World, program

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 40,
    "max_position_embeddings": 32,
}


def transformers():
    import transformers

    return transformers


def llama(world, **more):
    t = transformers()
    config = t.LlamaConfig(**SMALL, num_key_value_heads=1, pad_token_id=0, **more)
    return t.LlamaForCausalLM(config).to(world.device).eval()


@program("bert, pooled output", tags=["transformers", "text"])
def bert(world: World):
    t = transformers()
    model = t.BertModel(t.BertConfig(**SMALL)).to(world.device).eval()
    f = world.graphed(model, ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 1, 4):
            mask = torch.ones(n, 6, dtype=torch.int64, device=world.device)
            mask[0, 4:] = 0
            out = f(input_ids=world.randint(40, n, 6), attention_mask=mask)
            yield out.pooler_output, out.last_hidden_state[:, 0]
    ids = world.randint(40, 2, 6)
    world.diagnose(f, input_ids=ids, attention_mask=torch.ones_like(ids))


@program("distilbert classifier, logits of a data set", tags=["transformers", "text", "results-kept"])
def distilbert(world: World):
    t = transformers()
    config = t.DistilBertConfig(dim=16, n_layers=2, n_heads=2, hidden_dim=32, vocab_size=40, num_labels=3)
    f = world.graphed(t.DistilBertForSequenceClassification(config).to(world.device).eval(), ladder=[4])
    logits = []
    with torch.inference_mode():
        for ids in world.randint(40, 10, 8).split(4):
            logits.append(f(ids, attention_mask=(ids > 2).long()).logits)
    yield torch.cat(logits).softmax(-1)
    ids = world.randint(40, 3, 8)
    world.diagnose(f, ids, attention_mask=(ids > 2).long())


@program("llama prefill, whole prompts without a cache", tags=["transformers", "text"])
def llama_prefill(world: World):
    f = world.graphed(llama(world, use_cache=False), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (2, 3, 1):
            yield f(world.randint(40, n, 5)).logits[:, -1]
    world.diagnose(f, world.randint(40, 2, 5))


@program("llama decoding with past_key_values of transformers' own", tags=["transformers", "text", "cache"])
def llama_dynamic_cache(world: World):
    f = world.graphed(llama(world), ladder=[1, 2, 4])
    with torch.no_grad():
        out = f(world.randint(40, 3, 5))
        tokens = []
        for _ in range(4):
            token = out.logits[:, -1:].argmax(-1)
            tokens.append(token)
            out = f(token, past_key_values=out.past_key_values)
        yield torch.cat(tokens, 1)
    world.diagnose(f, world.randint(40, 3, 5))


@program("llama with a static cache", tags=["transformers", "text", "cache"])
def llama_static_cache(world: World):
    t = transformers()
    model = llama(world)
    cache = t.StaticCache(config=model.config, max_cache_len=16)

    def step(tokens, positions):
        return model(tokens, position_ids=positions, past_key_values=cache, use_cache=True).logits[:, -1]

    f = world.graphed(step, ladder=[2])
    with torch.no_grad():
        prompt = world.randint(40, 2, 4)
        logits = model(prompt, past_key_values=cache, use_cache=True).logits[:, -1]
        for position in range(4, 8):
            token = logits.argmax(-1, keepdim=True)
            logits = f(token, torch.full_like(token, position))
            yield token, logits
    world.diagnose(f, token, torch.full_like(token, 8))


@program("model.generate of a wrapped llama", tags=["transformers", "text", "generation"])
def llama_generate(world: World):
    f = world.graphed(llama(world), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (2, 3):
            ids = world.randint(38, n, 4) + 2
            mask = torch.ones_like(ids)
            yield f.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    world.diagnose(f, world.randint(40, 2, 4))


@program("gpt2 with labels, a loss for each call", tags=["transformers", "text", "batch-dependent"])
def gpt2_loss(world: World):
    t = transformers()
    config = t.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40, n_positions=16)
    f = world.graphed(t.GPT2LMHeadModel(config).to(world.device).eval(), ladder=[2, 4])
    with torch.no_grad():
        for n in (2, 3, 4):
            ids = world.randint(40, n, 6)
            yield f(ids, labels=ids).loss.item()
    ids = world.randint(40, 2, 6)
    world.diagnose(f, ids, labels=ids)


@program("gpt2 with output_hidden_states and attentions", tags=["transformers", "text", "structures"])
def gpt2_hidden(world: World):
    t = transformers()
    config = t.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40, attn_implementation="eager")
    f = world.graphed(t.GPT2Model(config).to(world.device).eval(), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (1, 3):
            out = f(
                world.randint(40, n, 6), output_hidden_states=True, output_attentions=True, use_cache=False
            )
            yield out.hidden_states[1], out.attentions, len(out.hidden_states)
    world.diagnose(
        f, world.randint(40, 3, 6), output_hidden_states=True, output_attentions=True, use_cache=False
    )


@program("t5: encoder once, decoder step by step", tags=["transformers", "text", "generation"])
def t5(world: World):
    t = transformers()
    config = t.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=40, decoder_start_token_id=0
    )
    model = t.T5ForConditionalGeneration(config).to(world.device).eval()
    encode = world.graphed(model.get_encoder(), ladder=[1, 2, 4])

    def decode(tokens, states):
        out = model(decoder_input_ids=tokens, encoder_outputs=(states,), use_cache=False)
        return out.logits[:, -1].argmax(-1, keepdim=True)

    f = world.graphed(decode, ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 2):
            states = encode(world.randint(40, n, 5)).last_hidden_state
            tokens = torch.zeros(n, 1, dtype=torch.int64, device=world.device)
            for _ in range(3):
                tokens = torch.cat([tokens, f(tokens, states)], 1)
            yield tokens
    world.diagnose(encode, world.randint(40, 2, 5))


@program("vit for image classification", tags=["transformers", "vision"])
def vit(world: World):
    t = transformers()
    config = t.ViTConfig(
        **{k: v for k, v in SMALL.items() if "v" not in k[:1] and "max" not in k}, image_size=8, patch_size=4
    )
    f = world.graphed(t.ViTForImageClassification(config).to(world.device).eval(), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (2, 4, 3):
            out = f(pixel_values=world.randn(n, 3, 8, 8))
            yield out.logits, out["logits"].argmax(-1), list(out.keys())
    world.diagnose(f, pixel_values=world.randn(3, 3, 8, 8))


@program("clip: text and image features compared", tags=["transformers", "vision", "text"])
def clip(world: World):
    t = transformers()
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = t.CLIPConfig(
        text_config={**shape, "vocab_size": 40, "max_position_embeddings": 8, "eos_token_id": 39},
        vision_config={**shape, "image_size": 8, "patch_size": 4},
        projection_dim=8,
    )
    model = t.CLIPModel(config).to(world.device).eval()
    text = world.graphed(
        lambda ids: model.text_projection(model.text_model(ids).pooler_output), ladder=[1, 2, 4]
    )
    image = world.graphed(
        lambda px: model.visual_projection(model.vision_model(px).pooler_output), ladder=[1, 2, 4]
    )
    with torch.no_grad():
        for n, m in ((3, 2), (1, 4)):
            a, b = text(world.randint(40, n, 6)), image(world.randn(m, 3, 8, 8))
            a, b = a / a.norm(dim=-1, keepdim=True), b / b.norm(dim=-1, keepdim=True)
            yield (b @ a.T * 100).softmax(-1)
    world.diagnose(text, world.randint(40, 2, 6))
    world.diagnose(image, world.randn(2, 3, 8, 8))


@program("wav2vec2 for ctc", tags=["transformers", "audio"])
def wav2vec2(world: World):
    t = transformers()
    config = t.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=12,
        conv_dim=(8, 8), conv_stride=(4, 4), conv_kernel=(8, 4), num_feat_extract_layers=2,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, do_stable_layer_norm=False,
    )  # fmt: skip
    f = world.graphed(t.Wav2Vec2ForCTC(config).to(world.device).eval(), ladder=[1, 2])
    with torch.no_grad():
        for n in (2, 1):
            yield f(world.randn(n, 160)).logits.argmax(-1)
    world.diagnose(f, world.randn(2, 160))


@program("whisper encoder", tags=["transformers", "audio"])
def whisper(world: World):
    t = transformers()
    config = t.WhisperConfig(
        d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=10, vocab_size=40,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    model = t.WhisperModel(config).to(world.device).eval()
    f = world.graphed(model.encoder, ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (1, 3):
            yield f(world.randn(n, 8, 20)).last_hidden_state
    world.diagnose(f, world.randn(2, 8, 20))


@program("mamba without a cache", tags=["transformers", "text", "recurrent"])
def mamba(world: World):
    t = transformers()
    config = t.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=40, state_size=4, use_cache=False)
    f = world.graphed(t.MambaForCausalLM(config).to(world.device).eval(), ladder=[1, 2])
    with torch.no_grad():
        for n in (2, 1):
            yield f(world.randint(40, n, 5)).logits
    world.diagnose(f, world.randint(40, 2, 5))


@program("mixtral, experts chosen per token", tags=["transformers", "text", "routing"])
def mixtral(world: World):
    t = transformers()
    config = t.MixtralConfig(
        **SMALL, num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2, use_cache=False
    )
    f = world.graphed(t.MixtralForCausalLM(config).to(world.device).eval(), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (2, 3, 4):
            yield f(world.randint(40, n, 4)).logits
    world.diagnose(f, world.randint(40, 2, 4))


@program("llama: attention implementation switched after the capture", tags=["transformers", "changes"])
def switched_attention(world: World):
    model = llama(world, use_cache=False, attn_implementation="sdpa")
    f = world.graphed(model, ladder=[1, 2])
    ids = world.randint(40, 2, 5)
    with torch.no_grad():
        yield f(ids).logits
        model.set_attn_implementation("eager")
        yield f(ids).logits
        yield f(ids, output_attentions=True).attentions
    world.diagnose(f, ids)


@program("bert with a new classifier head put in after the capture", tags=["transformers", "changes"])
def new_head(world: World):
    t = transformers()
    model = t.BertForSequenceClassification(t.BertConfig(**SMALL, num_labels=2)).to(world.device).eval()
    f = world.graphed(model, ladder=[1, 2, 4])
    ids = world.randint(40, 3, 6)
    with torch.no_grad():
        yield f(ids).logits
        model.classifier = nn.Linear(16, 5).to(world.device)
        yield f(ids).logits
    world.diagnose(f, ids)


@program(
    "sentence embeddings by mean pooling over a wrapped bert", tags=["transformers", "text", "results-kept"]
)
def sentence_bert(world: World):
    t = transformers()
    bert = world.graphed(t.BertModel(t.BertConfig(**SMALL)).to(world.device).eval(), ladder=[1, 2, 4])
    vectors = []
    with torch.no_grad():
        for n in (4, 2, 4):
            ids = world.randint(40, n, 6)
            mask = (ids > 5).long()
            out = bert(ids, attention_mask=mask)
            hidden = out.last_hidden_state
            vectors.append((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1))
    yield torch.cat(vectors)
    world.diagnose(bert, ids, attention_mask=mask)


@program("inputs_embeds instead of input_ids", tags=["transformers", "text", "signatures"])
def inputs_embeds(world: World):
    model = llama(world, use_cache=False)
    f = world.graphed(model, ladder=[1, 2, 4])
    with torch.no_grad():
        ids = world.randint(40, 3, 5)
        yield f(input_ids=ids).logits
        yield f(inputs_embeds=model.get_input_embeddings()(ids)).logits
        yield f(input_ids=ids).logits
    world.diagnose(f, input_ids=ids)


@program("return_dict=False gives tuples", tags=["transformers", "structures"])
def tuples(world: World):
    t = transformers()
    model = t.BertModel(t.BertConfig(**SMALL)).to(world.device).eval()
    f = world.graphed(model, ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 4):
            hidden, pooled = f(world.randint(40, n, 6), return_dict=False)
            yield hidden.mean(1), pooled
    world.diagnose(f, world.randint(40, 3, 6), return_dict=False)


@program("roberta's position ids from padding", tags=["transformers", "text"])
def roberta(world: World):
    t = transformers()
    model = t.RobertaModel(t.RobertaConfig(**SMALL, pad_token_id=1)).to(world.device).eval()
    f = world.graphed(model, ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 1):
            ids = world.randint(38, n, 6) + 2
            ids[:, 4:] = 1
            yield f(ids, attention_mask=(ids != 1).long()).last_hidden_state
    world.diagnose(f, ids, attention_mask=(ids != 1).long())


@program("a backbone of transformers inside one's own module", tags=["transformers", "modules"])
def backbone(world: World):
    t = transformers()

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = t.BertModel(t.BertConfig(**SMALL), add_pooling_layer=False)
            self.dropout, self.head = nn.Dropout(0.1), nn.Linear(16, 3)

        def forward(self, batch):
            hidden = self.backbone(**batch).last_hidden_state
            return {"logits": self.head(self.dropout(hidden[:, 0])), "embedding": hidden[:, 0]}

    f = world.graphed(Classifier().to(world.device).eval(), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (2, 3):
            ids = world.randint(40, n, 5)
            yield f({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    world.diagnose(f, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
