"""Contrastive and self-supervised learning, metric learning, moving teachers."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from corpus.training_models import ConvNet, images, mlp, seeded, vectors
from corpus.training_twice import program


def two_views(run, steps, rows=8, width=16):
    return [
        (x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x))
        for x, _ in vectors(run, steps, rows, width)
    ]


def info_nce(a, b, temperature=0.1):
    logits = F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T / temperature
    labels = torch.arange(len(a), device=a.device)
    return 0.5 * (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels))


class Siamese(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, *views):
        return tuple(self.encoder(v) for v in views)


@program
def simclr_with_nt_xent(run):
    def nt_xent(z, _):
        z = F.normalize(z, dim=-1)
        similarity = z @ z.T / 0.5
        similarity = similarity.masked_fill(torch.eye(len(z), dtype=torch.bool, device=z.device), -1e9)
        half = len(z) // 2
        target = (torch.arange(len(z), device=z.device) + half) % len(z)
        return F.cross_entropy(similarity, target)

    model = mlp(16, 32, 8).to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    step = run.train_step(model, nt_xent, optimizer)
    dummy = torch.zeros(16, 1, device=run.device)
    return [step(torch.cat(v), dummy) for v in two_views(run, 10)], model


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = ConvNet(classes=8, norm=lambda c: nn.GroupNorm(2, c)), nn.EmbeddingBag(32, 8)
        self.logit_scale = nn.Parameter(torch.tensor(2.66))

    def forward(self, image, text):
        a, b = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        return self.logit_scale.exp() * a @ b.T


def clip_loss(logits, labels):
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


@program
def clip_whose_temperature_is_clamped_after_each_step(run):
    model = CLIP().to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.98), eps=1e-6)
    step = run.train_step(model, clip_loss, optimizer, clip_norm=1.0)
    g = seeded()
    losses, scales = [], []
    labels = torch.arange(4, device=run.device)
    for x, _ in images(run, 10):
        losses.append(step((x, torch.randint(32, (4, 6), generator=g).to(run.device)), labels))
        with torch.no_grad():
            model.logit_scale.clamp_(0, 2.7)
        scales.append(model.logit_scale.exp().item())
    return losses, scales, model


@program
def siglip_with_a_learned_bias(run):
    class SigLIP(CLIP):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.tensor(-10.0))

        def forward(self, image, text):
            logits = super().forward(image, text) + self.bias
            labels = 2 * torch.eye(len(logits), device=logits.device) - 1
            return -F.logsigmoid(labels * logits).sum() / len(logits)

    model = SigLIP().to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = run.train_step(model, lambda loss, _: loss, optimizer)
    g = seeded()
    texts = [torch.randint(32, (4, 6), generator=g).to(run.device) for _ in range(8)]
    return [step((x, t), y) for (x, y), t in zip(images(run, 8), texts, strict=True)], model


class MoCo(nn.Module):
    def __init__(self, pointer_in_python, size=32):
        super().__init__()
        self.query = mlp(16, 24, 8)
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(size, 8), dim=-1))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))
        self.pointer_in_python = pointer_in_python

    @torch.no_grad()
    def enqueue(self, keys):
        if self.pointer_in_python:
            start = int(self.pointer)
            self.queue[start : start + len(keys)] = keys
            self.pointer[0] = (start + len(keys)) % len(self.queue)
        else:
            index = (self.pointer + torch.arange(len(keys), device=keys.device)) % len(self.queue)
            self.queue.index_copy_(0, index, keys)
            self.pointer.add_(len(keys)).remainder_(len(self.queue))

    def forward(self, a, b):
        q = F.normalize(self.query(a), dim=-1)
        with torch.no_grad():
            for pk, pq in zip(self.key.parameters(), self.query.parameters(), strict=True):
                pk.mul_(0.9).add_(pq, alpha=0.1)
            k = F.normalize(self.key(b), dim=-1)
        logits = torch.cat([(q * k).sum(-1, keepdim=True), q @ self.queue.clone().T], 1) / 0.2
        self.enqueue(k)
        return logits


def train_moco(run, pointer_in_python):
    model = MoCo(pointer_in_python).to(run.device)
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    zeros = torch.zeros(8, dtype=torch.long, device=run.device)
    return [step(v, zeros) for v in two_views(run, 10)], model


@program
def moco_with_the_official_queue_pointer(run):
    return train_moco(run, pointer_in_python=True)


@program
def moco_with_a_queue_pointer_on_the_device(run):
    return train_moco(run, pointer_in_python=False)


@program
def byol_with_an_average_in_the_loop(run):
    online = nn.Sequential(mlp(16, 24, 8), nn.BatchNorm1d(8)).to(run.device)
    predictor = mlp(8, 16, 8).to(run.device)
    target = copy.deepcopy(online).requires_grad_(False)

    class BYOL(nn.Module):
        def __init__(self):
            super().__init__()
            self.online, self.predictor = online, predictor

        def forward(self, a, b):
            with torch.no_grad():
                ta, tb = target(a), target(b)
            pa, pb = self.predictor(self.online(a)), self.predictor(self.online(b))
            return 4 - 2 * (F.cosine_similarity(pa, tb).mean() + F.cosine_similarity(pb, ta).mean())

    model = BYOL()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    step = run.train_step(model, lambda loss, _: loss, optimizer)
    losses = []
    for i, (a, b) in enumerate(two_views(run, 12)):
        losses.append(step((a, b), a))
        tau = 0.9 + 0.1 * i / 12
        with torch.no_grad():
            for t, o in zip(target.parameters(), online.parameters(), strict=True):
                t.data.mul_(tau).add_(o.data, alpha=1 - tau)
    return losses, model, target


@program
def byol_whose_average_runs_in_forward(run):
    class BYOL(nn.Module):
        def __init__(self):
            super().__init__()
            self.online, self.predictor = mlp(16, 24, 8), mlp(8, 8, 8)
            self.target = copy.deepcopy(self.online)
            for p in self.target.parameters():
                p.requires_grad = False

        def forward(self, a, b):
            with torch.no_grad():
                for t, o in zip(self.target.parameters(), self.online.parameters(), strict=True):
                    t.lerp_(o, 0.05)
                goal = self.target(b)
            return 2 - 2 * F.cosine_similarity(self.predictor(self.online(a)), goal).mean()

    model = BYOL().to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = run.train_step(model, lambda loss, _: loss, optimizer)
    return [step((a, b), a) for a, b in two_views(run, 10)], model


@program
def dino_with_centering_and_a_temperature_schedule(run):
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("center", torch.zeros(8))
            self.temperatures = [0.04 + 0.005 * i for i in range(4)]
            self.epoch = 0

        def forward(self, student, teacher):
            probs = F.softmax((teacher - self.center) / self.temperatures[self.epoch], -1)
            with torch.no_grad():
                self.center.mul_(0.9).add_(teacher.mean(0), alpha=0.1)
            return -(probs * F.log_softmax(student / 0.1, -1)).sum(-1).mean()

    student, criterion = mlp(16, 24, 8).to(run.device), Loss().to(run.device)
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    step = run.train_step(student, criterion, optimizer, clip_norm=3.0)
    losses = []
    for epoch in range(3):
        criterion.epoch = epoch
        for a, b in two_views(run, 5):
            losses.append(step(a, teacher(b)))
            with torch.no_grad():
                for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
                    t.mul_(0.99).add_(s.detach(), alpha=0.01)
    return losses, student, teacher, criterion


@program
def barlow_twins(run):
    def barlow(outputs, _):
        a, b = outputs
        a, b = (a - a.mean(0)) / (a.std(0) + 1e-5), (b - b.mean(0)) / (b.std(0) + 1e-5)
        c = a.T @ b / len(a)
        diagonal = (torch.diagonal(c) - 1).pow(2).sum()
        off = c.flatten()[:-1].view(len(c) - 1, len(c) + 1)[:, 1:].pow(2).sum()
        return diagonal + 0.005 * off

    model = Siamese(mlp(16, 24, 8)).to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = run.train_step(model, barlow, optimizer)
    return [step(v, v[0]) for v in two_views(run, 8)], model


@program
def vicreg(run):
    def loss(outputs, _):
        a, b = outputs
        invariance = F.mse_loss(a, b)
        variance = sum(F.relu(1 - (v.var(0) + 1e-4).sqrt()).mean() for v in (a, b))
        covariance = 0.0
        for v in (a, b):
            v = v - v.mean(0)
            c = v.T @ v / (len(v) - 1)
            covariance = covariance + (c.pow(2).sum() - c.diagonal().pow(2).sum()) / c.shape[0]
        return 25 * invariance + 25 * variance + covariance

    model = Siamese(mlp(16, 24, 8)).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = run.train_step(model, loss, optimizer)
    return [step(v, v[0]) for v in two_views(run, 8)], model


@program
def simsiam_with_stop_gradient(run):
    class SimSiam(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 8))
            self.predictor = mlp(8, 4, 8)

        def forward(self, a, b):
            za, zb = self.encoder(a), self.encoder(b)
            return self.predictor(za), self.predictor(zb), za.detach(), zb.detach()

    criterion = nn.CosineSimilarity(dim=1)
    model = SimSiam().to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = run.train_step(
        model, lambda o, _: -(criterion(o[0], o[3]).mean() + criterion(o[1], o[2]).mean()) * 0.5, optimizer
    )
    return [step(v, v[0]) for v in two_views(run, 10)], model


@program
def masked_autoencoder_with_a_fixed_share_of_patches(run):
    class MAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = nn.Linear(12, 24), nn.Linear(24, 12)
            self.mask_token = nn.Parameter(torch.zeros(24))

        def forward(self, image):
            x = F.unfold(image, 2, stride=2).transpose(1, 2)
            order = torch.rand(x.shape[:2], device=x.device).argsort(1)
            keep, restore = order[:, :4], order.argsort(1)
            h = self.encoder(x.gather(1, keep[..., None].expand(-1, -1, 12)))
            tokens = torch.cat([h, self.mask_token.expand(len(x), x.shape[1] - 4, -1)], 1)
            out = self.decoder(tokens.gather(1, restore[..., None].expand(-1, -1, 24)))
            hidden = (restore >= 4).float()
            return ((out - x).pow(2).mean(-1) * hidden).sum() / hidden.sum()

    model = MAE().to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = run.train_step(model, lambda loss, _: loss, optimizer)
    return [step(x, y) for x, y in images(run, 8)], model


@program
def triplet_margin(run):
    model = Siamese(mlp(16, 24, 8)).to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.TripletMarginLoss(margin=1.0)
    step = run.train_step(model, lambda o, _: criterion(*o), optimizer)
    losses = []
    for x, y in vectors(run, 10):
        losses.append(step((x, x + 0.1 * torch.randn_like(x), x.roll(1, 0)), y))
    return losses, model


@program
def batch_hard_triplets(run):
    def loss(z, y):
        d = torch.cdist(z, z)
        same = y[:, None] == y[None]
        positive = (d * same).amax(1)
        negative = d.masked_fill(same, float("inf")).amin(1).clamp(max=1e3)
        return F.softplus(positive - negative).mean()

    model = mlp(16, 24, 8).to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = run.train_step(model, loss, optimizer)
    return [step(x, y) for x, y in vectors(run, 10)], model


@program
def arcface(run):
    class ArcFace(nn.Module):
        def __init__(self, scale=16.0, margin=0.3):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 8))
            self.scale, self.margin = scale, margin

        def forward(self, z, y):
            cosine = F.linear(F.normalize(z), F.normalize(self.weight)).clamp(-1 + 1e-6, 1 - 1e-6)
            shifted = torch.cos(torch.acos(cosine) + self.margin)
            return F.cross_entropy(self.scale * torch.where(F.one_hot(y, 4).bool(), shifted, cosine), y)

    model, head = mlp(16, 24, 8).to(run.device), ArcFace().to(run.device)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.05, momentum=0.9)
    step = run.train_step(model, head, optimizer)
    return [step(x, y) for x, y in vectors(run, 10)], model, head


@program
def supervised_contrastive_and_cross_entropy(run):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.proj, self.head = mlp(16, 24, 24), nn.Linear(24, 8), nn.Linear(24, 4)

        def forward(self, x):
            h = self.body(x).relu()
            return self.head(h), F.normalize(self.proj(h), dim=-1)

    def loss(out, y):
        logits, z = out
        eye = torch.eye(len(y), device=y.device)
        same = (y[:, None] == y[None]).float() - eye
        log_p = (z @ z.T / 0.1 - 1e9 * eye).log_softmax(-1)
        contrastive = -((same * log_p).sum(1) / same.sum(1).clamp(min=1)).mean()
        return F.cross_entropy(logits, y) + 0.5 * contrastive

    model = Net().to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = run.train_step(model, loss, optimizer)
    return [step(x, y) for x, y in vectors(run, 10)], model


@program
def prototypes_with_cross_batch_memory(run):
    class Memory(nn.Module):
        """Keeps the last embeddings as a ring, its end in Python."""

        def __init__(self):
            super().__init__()
            self.register_buffer("bank", torch.zeros(32, 8))
            self.end = 0

        def forward(self, z, y):
            z = F.normalize(z, dim=-1)
            loss = info_nce(z, z.roll(1, 0)) + 0.1 * (z @ self.bank.clone().T).pow(2).mean()
            self.bank[self.end : self.end + len(z)] = z.detach()
            self.end = (self.end + len(z)) % 32
            return loss

    model, memory = mlp(16, 24, 8).to(run.device), Memory().to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = run.train_step(model, memory, optimizer)
    return [step(x, y) for x, y in vectors(run, 10)], model, memory, memory.end


@program
def mean_teacher_with_consistency_ramp(run):
    student = mlp(16, 24, 4, dropout=0.2).to(run.device)
    teacher = copy.deepcopy(student).requires_grad_(False)
    weight = torch.zeros((), device=run.device)

    def loss(logits, target):
        y, soft = target
        return F.cross_entropy(logits, y, ignore_index=-1) + weight * F.mse_loss(logits.softmax(-1), soft)

    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)
    step = run.train_step(student, loss, optimizer)
    losses = []
    for i, (x, y) in enumerate(vectors(run, 12)):
        weight.fill_(min(1.0, i / 8))
        unlabelled = y.clone()
        unlabelled[4:] = -1
        with torch.no_grad():
            soft = teacher(x).softmax(-1)
        losses.append(step(x, (unlabelled, soft)))
        alpha = min(1 - 1 / (i + 1), 0.99)
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
                t.mul_(alpha).add_(s, alpha=1 - alpha)
    return losses, student, teacher


@program
def fixmatch_with_a_confidence_threshold(run):
    model = mlp(16, 24, 4).to(run.device)

    def loss(logits, y):
        labelled, weak, strong = logits.chunk(3)
        probs = weak.detach().softmax(-1)
        confidence, pseudo = probs.max(-1)
        mask = (confidence > 0.4).float()
        unlabelled = (F.cross_entropy(strong, pseudo, reduction="none") * mask).mean()
        return F.cross_entropy(labelled, y) + unlabelled

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    step = run.train_step(model, loss, optimizer)
    losses = []
    for x, y in vectors(run, 10):
        weak, strong = x + 0.05 * torch.randn_like(x), x + 0.5 * torch.randn_like(x)
        losses.append(step(torch.cat([x, weak, strong]), y))
    return losses, model


@program
def center_loss_with_its_own_optimizer(run):
    centers = nn.Parameter(torch.randn(4, 8, generator=seeded()).to(run.device))
    model, head = mlp(16, 24, 8).to(run.device), nn.Linear(8, 4).to(run.device)
    center_optimizer = torch.optim.SGD([centers], lr=0.5)

    def loss(z, y):
        return F.cross_entropy(head(z), y) + 0.01 * (z - centers[y]).pow(2).sum(-1).mean()

    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=1e-3)
    step = run.train_step(model, loss, optimizer)
    losses = []
    for x, y in vectors(run, 8):
        center_optimizer.zero_grad()
        losses.append(step(x, y))
        center_optimizer.step()
    return losses, model, head, centers
