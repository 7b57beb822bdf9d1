"""Language models, sequences, speech and translation; models of transformers."""

import math
import random
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from corpus.training_models import GPT, lm_loss, seeded, tokens
from corpus.training_twice import program


@program
def a_gpt(run):
    model = GPT().to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    step = run.train_step(model, lm_loss, optimizer, clip_norm=1.0)
    return [step(x, y) for x, y in tokens(run, [16] * 12)], model, optimizer


@program
def a_gpt_of_several_lengths(run):
    model = GPT().to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = run.train_step(model, lm_loss, optimizer, ladder=[8, 16, 32], clip_norm=1.0)
    lengths = [5, 8, 16, 30, 32, 12, 7, 16, 25, 9, 3, 32]
    return [step(x, y) for x, y in tokens(run, lengths)], model, optimizer


@program
def nano_gpt_with_dropout_decay_groups_and_accumulation(run):
    model = GPT(dropout=0.1, tied=True).to(run.device)
    decay = [p for p in model.parameters() if p.dim() >= 2]
    no_decay = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))

    def rate(i, warmup=2, total=6, top=1e-3, least=1e-4):
        if i < warmup:
            return top * (i + 1) / (warmup + 1)
        ratio = (i - warmup) / (total - warmup)
        return least + 0.5 * (1 + math.cos(math.pi * ratio)) * (top - least)

    step = run.train_step(model, lm_loss, optimizer, accumulate=3, clip_norm=1.0, schedule=rate)
    losses = [step(x, y) for x, y in tokens(run, [16] * 18)]
    return losses, model, optimizer, model.head.weight is model.embed.weight, step


@program
def perplexity_logged_every_fourth_step(run):
    model = GPT(layers=1).to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = run.train_step(model, lm_loss, optimizer)
    lines = []
    for i, (x, y) in enumerate(tokens(run, [12] * 12)):
        loss = step(x, y)
        if i % 4 == 0:
            rate = optimizer.param_groups[0]["lr"]
            lines.append(f"step {i:3d} loss {loss.item():.3f} ppl {loss.exp().item():.2f} lr {rate:.1e}")
    return lines


@program
def loss_per_token_with_a_mask(run):
    def loss_fn(logits, targets, mask):
        return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")

    model = GPT(layers=1).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = run.train_step(model, loss_fn, optimizer, ladder=[8, 16])
    return [step(x, y) for x, y in tokens(run, [8, 16, 8, 11, 16, 6, 8, 13])], model


@program
def char_rnn_lstm(run):
    class CharRNN(nn.Module):
        def __init__(self):
            super().__init__()
            # Not nn.LSTM(dropout=): on CUDA torch keeps the state of its draws for the whole process, so that
            # two runs of one program differ.
            self.embed, self.first = nn.Embedding(32, 16), nn.LSTM(16, 24, batch_first=True)
            self.drop, self.second = nn.Dropout(0.2), nn.LSTM(24, 24, batch_first=True)
            self.out = nn.Linear(24, 32)

        def forward(self, x):
            h, _ = self.first(self.embed(x))
            h, _ = self.second(self.drop(h))
            return self.out(h)

    model = CharRNN().to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    step = run.train_step(model, lm_loss, optimizer, clip_norm=0.5)
    return [step(x, y) for x, y in tokens(run, [10] * 8)], model


@program
def truncated_backpropagation_with_a_carried_hidden_state(run):
    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn, self.out = (
                nn.Embedding(32, 16),
                nn.GRU(16, 24, batch_first=True),
                nn.Linear(24, 32),
            )
            self.hidden = None

        def forward(self, x):
            h, self.hidden = self.rnn(self.embed(x), self.hidden)
            self.hidden = self.hidden.detach()
            return self.out(h)

    model = Stateful().to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    step = run.train_step(model, lm_loss, optimizer)
    return [step(x, y) for x, y in tokens(run, [10] * 8)], model, model.hidden


@program
def truncated_backpropagation_with_the_hidden_state_as_input(run):
    class RNN(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn, self.out = (
                nn.Embedding(32, 16),
                nn.GRU(16, 24, batch_first=True),
                nn.Linear(24, 32),
            )

        def forward(self, x, hidden):
            h, last = self.rnn(self.embed(x), hidden.transpose(0, 1))
            carried.copy_(last.detach().transpose(0, 1))
            return self.out(h)

    carried = torch.zeros(4, 1, 24, device=run.device)
    model = RNN().to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    step = run.train_step(model, lm_loss, optimizer)
    return [step((x, carried.clone()), y) for x, y in tokens(run, [10] * 8)], model, carried


class Seq2Seq(nn.Module):
    def __init__(self, causal=None, width=24, vocabulary=32):
        super().__init__()
        self.causal = causal
        self.embed = nn.Embedding(vocabulary, width, padding_idx=0)
        self.core = nn.Transformer(width, 2, 1, 1, 48, dropout=0.0, batch_first=True)
        self.out = nn.Linear(width, vocabulary)

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        padding = source == 0
        h = self.core(
            self.embed(source),
            self.embed(target),
            tgt_mask=mask,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=self.causal,
        )
        return self.out(h)


def translate(run, causal):
    model = Seq2Seq(causal).to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9)
    criterion = nn.CrossEntropyLoss(ignore_index=0, label_smoothing=0.1)
    step = run.train_step(
        model,
        lambda out, t: criterion(out.flatten(0, 1), t.flatten()),
        optimizer,
        schedule=lambda i: 24**-0.5 * min((i + 1) ** -0.5, (i + 1) * 5**-1.5),
    )
    g = seeded()
    losses = []
    for _ in range(8):
        source = torch.randint(1, 32, (4, 9), generator=g)
        source[:2, 6:] = 0
        target = torch.randint(1, 32, (4, 9), generator=g)
        source, target = source.to(run.device), target.to(run.device)
        losses.append(step((source, target[:, :-1]), target[:, 1:]))
    return losses, model


@program
def translation_with_teacher_forcing(run):
    return translate(run, None)


@program
def translation_with_teacher_forcing_and_tgt_is_causal(run):
    return translate(run, True)


class Decoder(nn.Module):
    """A recurrent decoder that sometimes feeds its own words."""

    def __init__(self):
        super().__init__()
        self.embed, self.cell, self.out = nn.Embedding(32, 16), nn.GRUCell(16, 24), nn.Linear(24, 32)
        self.ratio = 1.0

    def forward(self, target):
        h = target.new_zeros((target.shape[0], 24), dtype=torch.float32)
        word, outputs = target[:, 0], []
        for t in range(target.shape[1]):
            h = self.cell(self.embed(word), h)
            logits = self.out(h)
            outputs.append(logits)
            if t + 1 < target.shape[1]:
                word = self.choose(logits, target[:, t + 1])
        return torch.stack(outputs, 1)

    def choose(self, logits, truth):
        return truth if random.random() < self.ratio else logits.argmax(-1)


@program
def scheduled_sampling_with_pythons_random(run):
    model = Decoder().to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    step = run.train_step(model, lm_loss, optimizer)
    losses = []
    for i, (x, y) in enumerate(tokens(run, [6] * 8)):
        model.ratio = max(0.5, 1 - 0.1 * i)
        losses.append(step(x, y))
    return losses, model


@program
def scheduled_sampling_on_the_device(run):
    class Sampling(Decoder):
        def __init__(self):
            super().__init__()
            self.register_buffer("probability", torch.ones(()))

        def choose(self, logits, truth):
            keep = torch.rand(truth.shape, device=truth.device) < self.probability
            return torch.where(keep, truth, logits.argmax(-1))

    model = Sampling().to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    step = run.train_step(model, lm_loss, optimizer)
    losses = []
    for i, (x, y) in enumerate(tokens(run, [6] * 8)):
        model.probability.fill_(1 - 0.1 * i)
        losses.append(step(x, y))
    return losses, model


@program
def speech_recognition_with_ctc(run):
    class Acoustic(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.rnn = (
                nn.Conv1d(8, 16, 3, padding=1),
                nn.GRU(16, 12, batch_first=True, bidirectional=True),
            )
            self.out = nn.Linear(24, 10)

        def forward(self, x):
            h = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
            return self.out(self.rnn(h)[0]).log_softmax(-1)

    def criterion(log_probs, target):
        labels, input_lengths, label_lengths = target
        return F.ctc_loss(log_probs.transpose(0, 1), labels, input_lengths, label_lengths, zero_infinity=True)

    model = Acoustic().to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = run.train_step(model, criterion, optimizer)
    g = seeded()
    losses = []
    for _ in range(6):
        x = torch.randn(4, 20, 8, generator=g).to(run.device)
        labels = torch.randint(1, 10, (4, 5), generator=g).to(run.device)
        lengths = torch.tensor([20, 18, 20, 16]).to(run.device)
        losses.append(step(x, (labels, lengths, torch.tensor([5, 4, 3, 5]).to(run.device))))
    return losses, model


@program
def masked_language_model(run):
    layer = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.1, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(33, 24), encoder, nn.Linear(24, 33)).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = run.train_step(model, lm_loss, optimizer)
    g = seeded()
    losses = []
    for x, _ in tokens(run, [16] * 8):
        masked = (torch.rand(x.shape, generator=g) < 0.15).to(run.device)
        losses.append(step(x.masked_fill(masked, 32), x.masked_fill(~masked, -100)))
    return losses, model


@program
def sequence_tagging_of_varying_lengths(run):
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 5)).to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = run.train_step(model, lm_loss, optimizer, ladder=[8, 16])
    batches = [(x, y % 5) for x, y in tokens(run, [8, 5, 16, 12, 8, 15, 3, 16])]
    return [step(x, y) for x, y in batches], model


@program
def text_classifier_with_embedding_bag_and_collate_function(run):
    g = seeded()
    texts = [
        (torch.randint(1, 32, (int(n),), generator=g), int(n) % 3)
        for n in torch.randint(4, 12, (24,), generator=g)
    ]

    def collate(batch):
        lengths = torch.tensor([0] + [len(t) for t, _ in batch[:-1]]).cumsum(0)
        return torch.cat([t for t, _ in batch]), lengths, torch.tensor([label for _, label in batch])

    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag, self.fc = nn.EmbeddingBag(32, 16), nn.Linear(16, 3)

        def forward(self, text, offsets):
            return self.fc(self.bag(text, offsets))

    model = Bag().to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    loader = torch.utils.data.DataLoader(texts, batch_size=8, shuffle=True, collate_fn=collate)
    losses = []
    for _ in range(3):
        for text, offsets, label in loader:
            losses.append(step((text.to(run.device), offsets.to(run.device)), label.to(run.device)))
    return losses, model


@program
def text_classifier_with_padded_batches_and_lengths(run):
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.fc = nn.Embedding(32, 16, padding_idx=0), nn.Linear(16, 3)

        def forward(self, ids, lengths):
            mask = torch.arange(ids.shape[1], device=ids.device)[None] < lengths[:, None]
            h = self.embed(ids) * mask[..., None]
            return self.fc(h.sum(1) / lengths[:, None])

    g = seeded()
    model = Classifier().to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    losses = []
    for longest in (10, 10, 8, 10, 12, 10, 9, 8):
        lengths = torch.randint(3, longest + 1, (6,), generator=g)
        lengths[0] = longest
        ids = torch.randint(1, 32, (6, longest), generator=g)
        ids[torch.arange(longest)[None] >= lengths[:, None]] = 0
        losses.append(step((ids.to(run.device), lengths.to(run.device)), (lengths % 3).to(run.device)))
    return losses, model


@program
def packed_sequences(run):
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn, self.fc = (
                nn.Embedding(32, 16),
                nn.LSTM(16, 12, batch_first=True),
                nn.Linear(12, 3),
            )

        def forward(self, ids, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(
                self.embed(ids), lengths.cpu(), batch_first=True, enforce_sorted=False
            )
            return self.fc(self.rnn(packed)[1][0][-1])

    g = seeded()
    model = Packed().to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    losses = []
    for _ in range(6):
        lengths = torch.randint(3, 10, (6,), generator=g)
        ids = torch.randint(1, 32, (6, 10), generator=g)
        losses.append(step((ids.to(run.device), lengths.to(run.device)), (lengths % 3).to(run.device)))
    return losses, model


@program
def activation_checkpointing(run):
    class Checkpointed(GPT):
        def forward(self, ids):
            x = self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(self.norm(x))

    model = Checkpointed().to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = run.train_step(model, lm_loss, optimizer, ladder=[8, 16])
    return [step(x, y) for x, y in tokens(run, [8, 16, 12, 16, 8, 6])], model


@program
def bfloat16_autocast(run):
    model = GPT().to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = run.train_step(model, lm_loss, optimizer, autocast=torch.bfloat16, clip_norm=1.0)
    return [step(x, y) for x, y in tokens(run, [16] * 8)], model


@program
def autocast_written_around_the_step(run):
    model = GPT(layers=1).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = run.train_step(model, lm_loss, optimizer)
    losses = []
    for x, y in tokens(run, [16] * 8):
        with torch.autocast(run.device.type, dtype=torch.bfloat16):
            losses.append(step(x, y).float())
    return losses, model


@program
def pure_bfloat16(run):
    model = GPT(layers=1).to(run.device, torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = run.train_step(model, lambda out, t: lm_loss(out.float(), t), optimizer)
    return [step(x, y) for x, y in tokens(run, [16] * 8)], model


@program
def z_loss_and_auxiliary_head(run):
    class TwoHeads(GPT):
        def __init__(self):
            super().__init__()
            self.value = nn.Linear(32, 1)

        def forward(self, ids):
            x = self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x)), self.value(x).squeeze(-1)

    def criterion(outputs, targets):
        logits, value = outputs
        z = torch.logsumexp(logits, -1).pow(2).mean()
        return lm_loss(logits, targets) + 1e-4 * z + 0.1 * value.pow(2).mean()

    model = TwoHeads().to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = run.train_step(model, criterion, optimizer)
    return [step(x, y) for x, y in tokens(run, [12] * 8)], model


class MoE(nn.Module):
    """Top-1 routing with a balancing loss kept in an attribute."""

    def __init__(self, width=24, experts=4):
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.balance = None

    def forward(self, x):
        gates = self.router(x).softmax(-1)
        weight, chosen = gates.max(-1)
        out = torch.stack([e(x) for e in self.experts], -2)
        out = out.gather(-2, chosen[..., None, None].expand(*chosen.shape, 1, x.shape[-1])).squeeze(-2)
        share = F.one_hot(chosen, gates.shape[-1]).float().mean((0, 1))
        self.balance = gates.shape[-1] * (share * gates.mean((0, 1))).sum()
        return x + weight[..., None] * out


@program
def mixture_of_experts_with_a_balancing_loss(run):
    moe = MoE()
    model = nn.Sequential(nn.Embedding(32, 24), moe, nn.Linear(24, 32)).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = run.train_step(model, lambda out, t: lm_loss(out, t) + 0.01 * moe.balance, optimizer)
    return [step(x, y) for x, y in tokens(run, [12] * 8)], model


@program
def mixture_of_experts_that_loops_over_used_experts(run):
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(24, 4)
            self.experts = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))

        def forward(self, x):
            flat = x.reshape(-1, x.shape[-1])
            weight, chosen = self.router(flat).softmax(-1).max(-1)
            out = torch.zeros_like(flat)
            for i, expert in enumerate(self.experts):
                rows = torch.where(chosen == i)[0]
                if len(rows):
                    out = out.index_add(0, rows, expert(flat[rows]) * weight[rows, None])
            return x + out.view_as(x)

    model = nn.Sequential(nn.Embedding(32, 24), Sparse(), nn.Linear(24, 32)).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = run.train_step(model, lm_loss, optimizer)
    return [step(x, y) for x, y in tokens(run, [12] * 6)], model


@program
def rotary_attention_with_a_cache_of_angles(run):
    class Rotary(nn.Module):
        def __init__(self, width=16):
            super().__init__()
            self.width, self.cache = width, {}
            self.qkv, self.embed, self.out = (
                nn.Linear(width, 3 * width),
                nn.Embedding(32, width),
                nn.Linear(width, 32),
            )

        def angles(self, length, device):
            if length not in self.cache:
                inverse = 1.0 / 10000 ** (torch.arange(0, self.width, 2, device=device) / self.width)
                self.cache[length] = torch.outer(torch.arange(length, device=device).float(), inverse)
            return self.cache[length]

        def rotate(self, x):
            a, b = x.chunk(2, -1)
            angles = self.angles(x.shape[1], x.device)
            return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)

        def forward(self, ids):
            q, k, v = self.qkv(self.embed(ids)).chunk(3, -1)
            return self.out(F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True))

    model = Rotary().to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = run.train_step(model, lm_loss, optimizer, ladder=[8, 16])
    return [step(x, y) for x, y in tokens(run, [8, 16, 8, 16, 12, 5])], model.state_dict()


@program
def curriculum_of_sequence_lengths(run):
    model = GPT().to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = run.train_step(model, lm_loss, optimizer, ladder=[8, 16, 32])
    losses = []
    for length in (8, 16, 32):
        losses += [step(x, y) for x, y in tokens(run, [length] * 4, seed=length)]
    return losses, model, step


@dataclass
class Batch:
    ids: torch.Tensor
    mask: torch.Tensor


@program
def batches_as_dataclasses(run):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Embedding(32, 16), nn.Linear(16, 32)

        def forward(self, batch):
            return self.out(self.embed(batch.ids) * batch.mask[..., None])

    model = Model().to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = run.train_step(model, lm_loss, optimizer)
    losses = [step(Batch(x, (x > 3).float()), y) for x, y in tokens(run, [12] * 6)]
    return losses, model


@program
def dpo_with_a_reference_model(run):
    policy = GPT(layers=1).to(run.device)
    reference = GPT(layers=1).to(run.device).eval().requires_grad_(False)
    reference.load_state_dict(policy.state_dict())

    def log_probability(model, ids):
        logits = model(ids[:, :-1]).log_softmax(-1)
        return logits.gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1)

    class Preference(nn.Module):
        def __init__(self):
            super().__init__()
            self.policy = policy

        def forward(self, chosen, rejected):
            ours = log_probability(self.policy, chosen) - log_probability(self.policy, rejected)
            with torch.no_grad():
                theirs = log_probability(reference, chosen) - log_probability(reference, rejected)
            return ours - theirs

    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    step = run.train_step(Preference(), lambda out, beta: -F.logsigmoid(beta * out).mean(), optimizer)
    beta = torch.full((4, 1), 0.1, device=run.device)
    losses = [step((a, b), beta.squeeze(1)) for a, b in tokens(run, [10] * 8)]
    return losses, policy, reference


def tiny_llama(run, **more):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 32}
    config = LlamaConfig(
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, **sizes, **more
    )
    return LlamaForCausalLM(config).to(run.device)


@program
def a_llama_of_transformers_with_labels(run):
    model = tiny_llama(run).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = run.train_step(model, lambda out, labels: out.loss, optimizer, clip_norm=1.0)
    losses = [step({"input_ids": x, "labels": x}, x) for x, _ in tokens(run, [16] * 8)]
    return losses, model.state_dict(), optimizer


@program
def a_llama_of_transformers_whose_output_is_returned(run):
    model = tiny_llama(run, use_cache=False).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = run.train_step(model, lambda out, labels: out, optimizer)
    losses, hits = [], []
    for x, _ in tokens(run, [16] * 6):
        out = step({"input_ids": x, "labels": x}, x)
        losses.append(out.loss)
        hits.append((out.logits[:, :-1].argmax(-1) == x[:, 1:]).float().mean().item())
    return losses, hits, model.state_dict()


@program
def a_llama_of_transformers_with_padding_and_attention_mask(run):
    model = tiny_llama(run).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = run.train_step(model, lambda out, labels: out["loss"], optimizer)
    losses = []
    for i, (x, _) in enumerate(tokens(run, [12] * 8)):
        mask = torch.ones_like(x)
        mask[: 1 + i % 3, 9:] = 0
        labels = x.masked_fill(mask == 0, -100)
        losses.append(step({"input_ids": x, "attention_mask": mask, "labels": labels}, labels))
    return losses, model.state_dict()


@program
def a_bert_of_transformers_for_classification(run):
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=32,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        num_labels=3,
    )
    model = BertForSequenceClassification(config).to(run.device).train()
    no_decay = ("bias", "LayerNorm.weight")
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not n.endswith(no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in named if n.endswith(no_decay)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=5e-4)
    from transformers import get_linear_schedule_with_warmup

    scheduler = get_linear_schedule_with_warmup(optimizer, 2, 8)
    step = run.train_step(
        model, lambda out, labels: F.cross_entropy(out.logits, labels), optimizer, clip_norm=1.0
    )
    losses = []
    for x, y in tokens(run, [12] * 8):
        losses.append(step({"input_ids": x, "attention_mask": torch.ones_like(x)}, y[:, 0] % 3))
        scheduler.step()
    return losses, model.state_dict(), optimizer


@program
def a_t5_of_transformers(run):
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=32,
        d_model=24,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
        dropout_rate=0.0,
    )
    model = T5ForConditionalGeneration(config).to(run.device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = run.train_step(model, lambda out, labels: out.loss, optimizer)
    losses = [step({"input_ids": x, "labels": y}, y) for x, y in tokens(run, [10] * 6)]
    return losses, model.state_dict()


@program
def a_gpt2_of_transformers_of_several_lengths(run):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=32,
        n_positions=32,
        n_embd=24,
        n_layer=2,
        n_head=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    model = GPT2LMHeadModel(config).to(run.device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = run.train_step(model, lambda out, t: lm_loss(out.logits, t), optimizer, ladder=[8, 16])
    return [step({"input_ids": x}, y) for x, y in tokens(run, [16, 8, 12, 16, 7, 8])], model.state_dict()


@program
def data_collator_of_transformers_for_language_modelling(run):
    g = seeded()
    model = tiny_llama(run).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = run.train_step(model, lambda out, labels: out.loss, optimizer, accumulate=2)
    rows = [
        {"input_ids": torch.randint(1, 32, (int(n),), generator=g)}
        for n in torch.randint(6, 12, (24,), generator=g)
    ]

    def collate(batch):
        ids = nn.utils.rnn.pad_sequence([r["input_ids"] for r in batch], batch_first=True)
        mask = (ids != 0).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(ids == 0, -100)}

    loader = torch.utils.data.DataLoader(rows, batch_size=4, collate_fn=collate)
    losses = []
    for i, batch in enumerate(loader):
        batch = {k: v.to(run.device) for k, v in batch.items()}
        losses.append(step(batch, batch["labels"], last=i == len(loader) - 1))
    return losses, model.state_dict()
