"""Fine-tuning: frozen parts, adapters, prompts, heads."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from corpus.training_language import tiny_llama
from corpus.training_models import GPT, ConvNet, images, lm_loss, mlp, tokens, vectors
from corpus.training_twice import program


@program
def linear_probe_on_a_frozen_backbone(run):
    model = ConvNet().to(run.device)
    for p in model.parameters():
        p.requires_grad = False
    model.head = nn.Linear(16, 4).to(run.device)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    return [step(x, y) for x, y in images(run, 8)], model


@program
def frozen_backbone_given_whole_to_the_optimizer(run):
    model = nn.Sequential(mlp(16, 24, 24), nn.Linear(24, 4)).to(run.device)
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-2)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    return [step(x, y) for x, y in vectors(run, 8)], model, optimizer


@program
def backbone_unfrozen_after_an_epoch(run):
    model = nn.Sequential(mlp(16, 24, 24), nn.ReLU(), nn.Linear(24, 4)).to(run.device)
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    losses = [step(x, y) for x, y in vectors(run, 6)]
    model[0].requires_grad_(True)
    losses += [step(x, y) for x, y in vectors(run, 6, seed=2)]
    return losses, model


@program
def backbone_unfrozen_with_a_new_step(run):
    model = nn.Sequential(mlp(16, 24, 24), nn.ReLU(), nn.Linear(24, 4)).to(run.device)
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=1e-2)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    losses = [step(x, y) for x, y in vectors(run, 6)]
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 1e-3})
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    losses += [step(x, y) for x, y in vectors(run, 6, seed=2)]
    return losses, model, optimizer


@program
def group_added_and_the_step_kept(run):
    model = nn.Sequential(mlp(16, 24, 24), nn.ReLU(), nn.Linear(24, 4)).to(run.device)
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    losses = [step(x, y) for x, y in vectors(run, 5)]
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})
    losses += [step(x, y) for x, y in vectors(run, 5, seed=2)]
    return losses, model


@program
def gradual_unfreezing_from_the_top(run):
    model = mlp(16, 24, 24, 4).to(run.device)
    layers = [m for m in model if isinstance(m, nn.Linear)]
    for layer in layers[:-1]:
        layer.requires_grad_(False)
    losses = []
    for stage in range(3):
        layers[-1 - stage].requires_grad_(True)
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
        losses += [step(x, y) for x, y in vectors(run, 4, seed=stage)]
    return losses, model


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4, alpha=8):
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / rank
        self.a = nn.Parameter(0.02 * torch.randn(rank, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + self.scale * F.linear(F.linear(x, self.a), self.b)


@program
def lora_written_by_hand(run):
    model = GPT(layers=1).requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.proj = LoRALinear(block.qkv), LoRALinear(block.proj)
    model.to(run.device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    step = run.train_step(model, lm_loss, optimizer, ladder=[8, 16])
    losses = [step(x, y) for x, y in tokens(run, [16, 8, 12, 16, 8, 16])]
    adapters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return losses, adapters


@program
def lora_merged_for_validation(run):
    layer = LoRALinear(nn.Linear(16, 4)).to(run.device)
    step = run.train_step(layer, nn.CrossEntropyLoss(), torch.optim.AdamW([layer.a, layer.b], lr=1e-2))
    losses, held_out = [], []
    for i, (x, y) in enumerate(vectors(run, 9)):
        losses.append(step(x, y))
        if i % 3 == 2:
            with torch.no_grad():
                delta = layer.scale * layer.b @ layer.a
                layer.base.weight += delta
                held_out.append(layer.base(x).mean().item())
                layer.base.weight -= delta
    return losses, held_out, layer


@program
def lora_of_peft(run):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        tiny_llama(run), LoraConfig(r=4, lora_alpha=8, lora_dropout=0.05, target_modules=["q_proj", "v_proj"])
    )
    model.to(run.device).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    step = run.train_step(model, lambda out, labels: out.loss, optimizer)
    losses = [step({"input_ids": x, "labels": x}, x) for x, _ in tokens(run, [12] * 6)]
    return losses, {n: p for n, p in model.named_parameters() if p.requires_grad}


@program
def prefix_tuning_of_peft_by_prompt(run):
    from peft import PromptTuningConfig, TaskType, get_peft_model

    config = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4)
    model = get_peft_model(tiny_llama(run), config)
    model.to(run.device).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    step = run.train_step(model, lambda out, labels: out.loss, optimizer)
    losses = []
    for x, _ in tokens(run, [10] * 6):
        losses.append(step({"input_ids": x, "attention_mask": torch.ones_like(x), "labels": x}, x))
    return losses, {n: p for n, p in model.named_parameters() if p.requires_grad}


@program
def bottleneck_adapters_and_trained_norms(run):
    class Adapter(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.down, self.up = nn.Linear(width, 4), nn.Linear(4, width)
            nn.init.zeros_(self.up.weight)

        def forward(self, x):
            return x + self.up(F.gelu(self.down(x)))

    model = GPT(layers=2).requires_grad_(False)
    for block in model.blocks:
        block.mlp = nn.Sequential(block.mlp, Adapter(32))
        block.norm1.requires_grad_(True)
        block.norm2.requires_grad_(True)
    model.to(run.device)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in named if "norm" in n], "weight_decay": 0.0},
        {"params": [p for n, p in named if "norm" not in n]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    step = run.train_step(model, lm_loss, optimizer, clip_norm=1.0)
    return [step(x, y) for x, y in tokens(run, [12] * 6)], model


@program
def soft_prompt_before_a_frozen_model(run):
    class Prompted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base.requires_grad_(False)
            self.prompt = nn.Parameter(0.02 * torch.randn(4, 32))

        def forward(self, ids):
            x = torch.cat([self.prompt.expand(len(ids), -1, -1), self.base.embed(ids)], 1)
            for block in self.base.blocks:
                x = block(x)
            return self.base.head(self.base.norm(x))[:, 4:]

    model = Prompted(GPT()).to(run.device)
    step = run.train_step(model, lm_loss, torch.optim.Adam([model.prompt], lr=0.1))
    return [step(x, y) for x, y in tokens(run, [12] * 6)], model


@program
def head_replaced_and_rates_per_part(run):
    model = ConvNet(classes=10)
    model.head = nn.Linear(16, 4)
    model.to(run.device)
    body = [p for n, p in model.named_parameters() if not n.startswith("head")]
    groups = [{"params": body, "lr": 1e-4}, {"params": model.head.parameters(), "lr": 1e-2}]
    optimizer = torch.optim.AdamW(groups)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [1e-4, 1e-2], total_steps=10, cycle_momentum=False
    )
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    losses, rates = [], []
    for x, y in images(run, 8):
        losses.append(step(x, y))
        scheduler.step()
        rates.append([g["lr"] for g in optimizer.param_groups])
    return losses, rates, model


@program
def distance_to_the_pretrained_weights(run):
    model = mlp(16, 24, 4).to(run.device)
    start = [p.detach().clone() for p in model.parameters()]

    def criterion(out, y):
        return F.cross_entropy(out, y) + 0.1 * sum(
            (p - s).pow(2).sum() for p, s in zip(model.parameters(), start, strict=True)
        )

    step = run.train_step(model, criterion, torch.optim.SGD(model.parameters(), lr=0.05))
    return [step(x, y) for x, y in vectors(run, 8)], model


@program
def weights_of_a_teacher_copied_in_between(run):
    teacher, student = mlp(16, 24, 4).to(run.device), mlp(16, 24, 4).to(run.device)
    t_step = run.train_step(teacher, nn.CrossEntropyLoss(), torch.optim.Adam(teacher.parameters(), lr=1e-2))
    s_step = run.train_step(student, nn.CrossEntropyLoss(), torch.optim.Adam(student.parameters(), lr=1e-2))
    losses = []
    for i, (x, y) in enumerate(vectors(run, 8)):
        losses.append(t_step(x, y))
        losses.append(s_step(x, teacher(x).argmax(-1)))
        if i == 4:
            student.load_state_dict(teacher.state_dict())
    return losses, teacher, student


@program
def reward_model_with_pairs(run):
    class Reward(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.score = GPT(layers=1), nn.Linear(32, 1)

        def forward(self, chosen, rejected):
            return self.score_of(chosen) - self.score_of(rejected)

        def score_of(self, ids):
            return self.score(self.body(ids)[:, -1])

    model = Reward().to(run.device)
    step = run.train_step(
        model, lambda d, _: -F.logsigmoid(d).mean(), torch.optim.AdamW(model.parameters(), lr=1e-3)
    )
    return [step((a, b), a) for a, b in tokens(run, [10] * 6)], model


@program
def layer_dropped_from_a_copy_and_distilled(run):
    teacher = GPT(layers=2).to(run.device).eval().requires_grad_(False)
    student = copy.deepcopy(teacher).requires_grad_(True).train()
    student.blocks = student.blocks[:1]

    def criterion(logits, target):
        y, soft = target
        kd = F.kl_div(logits.log_softmax(-1), soft, reduction="none").sum(-1).mean()
        return lm_loss(logits, y) + kd

    step = run.train_step(student, criterion, torch.optim.AdamW(student.parameters(), lr=1e-3))
    losses = []
    for x, y in tokens(run, [12] * 6):
        with torch.no_grad():
            soft = teacher(x).softmax(-1)
        losses.append(step(x, (y, soft)))
    return losses, student


@program
def half_precision_base_with_float32_adapters(run):
    base = mlp(16, 24, 24).to(run.device, torch.bfloat16).requires_grad_(False)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.head = base, nn.Linear(24, 4)

        def forward(self, x):
            return self.head(self.base(x.bfloat16()).float())

    model = Model().to(run.device)
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.head.parameters(), lr=1e-2))
    return [step(x, y) for x, y in vectors(run, 8)], model
