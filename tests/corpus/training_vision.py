"""Classifiers and segmentation: images and vectors, norms, augmentation, losses."""

import copy
import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from corpus.training_models import ConvNet, images, mlp, regression, vectors
from corpus.training_twice import program


@program
def a_classifier(run):
    model = mlp(16, 32, 4).to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    losses = [step(x, y) for x, y in vectors(run, 20)]
    return losses, model, optimizer, step


@program
def a_classifier_with_dropout_that_logs_its_mean_loss(run):
    model = mlp(16, 32, 32, 4, dropout=0.3).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    step = run.train_step(model, F.cross_entropy, optimizer)
    running, log = 0.0, []
    for i, (x, y) in enumerate(vectors(run, 20)):
        running += step(x, y).item()
        if i % 5 == 4:
            log.append({"step": i + 1, "loss": running / 5})
            running = 0.0
    return log, model, optimizer


@program
def label_smoothing(run):
    model = mlp(16, 24, 4, act=nn.GELU).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    step = run.train_step(model, nn.CrossEntropyLoss(label_smoothing=0.1), optimizer, clip_norm=1.0)
    return [step(x, y) for x, y in vectors(run, 12)], model, optimizer, step


@program
def class_weights(run):
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0], device=run.device)
    model = mlp(16, 24, 4).to(run.device)
    optimizer = torch.optim.Adam(model.parameters())
    step = run.train_step(model, nn.CrossEntropyLoss(weight=weight), optimizer)
    return [step(x, y) for x, y in vectors(run, 10)], model


class FocalLoss(nn.Module):
    def __init__(self, gamma=2.0, alpha=0.25):
        super().__init__()
        self.gamma, self.alpha = gamma, alpha

    def forward(self, logits, target):
        ce = F.cross_entropy(logits, target, reduction="none")
        return (self.alpha * (1 - torch.exp(-ce)) ** self.gamma * ce).mean()


@program
def focal_loss(run):
    model = mlp(16, 24, 4).to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    step = run.train_step(model, FocalLoss(), optimizer)
    return [step(x, y) for x, y in vectors(run, 10)], model


@program
def binary_classifier_with_pos_weight(run):
    model = mlp(16, 16, 1).to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0], device=run.device))
    step = run.train_step(model, criterion, optimizer)
    losses = [step(x, (y > 1).float().unsqueeze(1)) for x, y in vectors(run, 12)]
    return losses, model


@program
def multi_label_with_a_lambda_as_loss(run):
    model = mlp(16, 16, 5).to(run.device)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    step = run.train_step(model, lambda out, t: F.binary_cross_entropy_with_logits(out, t.float()), optimizer)
    g = torch.Generator().manual_seed(1)
    losses = []
    for x, _ in vectors(run, 10):
        losses.append(step(x, torch.randint(2, (8, 5), generator=g).to(run.device)))
    return losses, model


@program
def huber_regression(run):
    model = mlp(16, 32, 1, act=nn.SiLU).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = run.train_step(model, nn.HuberLoss(delta=0.5), optimizer)
    return [step(x, y) for x, y in regression(run, 15)], model, optimizer


@program
def squeezed_regression_over_an_epoch_with_a_smaller_last_batch(run):
    g = torch.Generator().manual_seed(3)
    x, y = torch.randn(44, 6, generator=g).to(run.device), torch.randn(44, generator=g).to(run.device)
    model = mlp(6, 16, 1).to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = run.train_step(model, lambda out, t: F.mse_loss(out.squeeze(-1), t), optimizer)
    history = []
    for _ in range(3):
        total = 0.0
        for i in range(0, len(x), 8):
            total += float(step(x[i : i + 8], y[i : i + 8])) * len(x[i : i + 8])
        history.append(total / len(x))
    return history, model, optimizer


@program
def quantile_regression(run):
    quantiles = torch.tensor([0.1, 0.5, 0.9], device=run.device)

    def pinball(out, y):
        error = y - out
        return torch.maximum(quantiles * error, (quantiles - 1) * error).mean()

    model = mlp(16, 16, 3).to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = run.train_step(model, pinball, optimizer)
    return [step(x, y) for x, y in regression(run, 10)], model


@program
def gaussian_regression_with_variance(run):
    model = mlp(16, 16, 2).to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def nll(out, y):
        mean, log_var = out.chunk(2, dim=-1)
        return F.gaussian_nll_loss(mean, y, log_var.exp())

    step = run.train_step(model, nll, optimizer)
    return [step(x, y) for x, y in regression(run, 12)], model


@program
def ordinal_regression(run):
    model = mlp(16, 16, 3).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def coral(logits, y):
        levels = (y.unsqueeze(1) > torch.arange(3, device=y.device)).float()
        return F.binary_cross_entropy_with_logits(logits, levels)

    step = run.train_step(model, coral, optimizer)
    return [step(x, y) for x, y in vectors(run, 10)], model


@program
def conv_net_with_batch_norm(run):
    model = ConvNet().to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    return [step(x, y) for x, y in images(run, 10)], model, optimizer


@program
def conv_net_with_validation_after_each_epoch(run):
    model = ConvNet().to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    train, held_out = images(run, 5), images(run, 2, seed=9)
    history, best, best_state = [], -1.0, None
    for epoch in range(4):
        model.train()
        losses = [step(x, y) for x, y in train]
        model.eval()
        with torch.no_grad():
            correct = sum((model(x).argmax(-1) == y).sum().item() for x, y in held_out)
        accuracy = correct / 8
        if accuracy > best:
            best, best_state = accuracy, copy.deepcopy(model.state_dict())
        history.append({"epoch": epoch, "loss": torch.stack(losses).mean().item(), "accuracy": accuracy})
    return history, best, best_state, model


@program
def conv_net_with_group_norm_in_channels_last(run):
    model = ConvNet(norm=lambda c: nn.GroupNorm(2, c)).to(run.device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    losses = [step(x.to(memory_format=torch.channels_last), y) for x, y in images(run, 8)]
    return losses, model


class BasicBlock(nn.Module):
    def __init__(self, cin, cout, stride, drop_path=0.0):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.BatchNorm2d(cout)
        self.conv2, self.bn2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False), nn.BatchNorm2d(cout)
        self.short = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))
        self.drop_path = drop_path

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.training and self.drop_path > 0:
            keep = 1 - self.drop_path
            out = out * (x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(keep) / keep)
        return F.relu(out + self.short(x))


@program
def resnet_with_stochastic_depth_and_cosine_rate(run):
    model = nn.Sequential(
        BasicBlock(3, 8, 1, 0.1),
        BasicBlock(8, 16, 2, 0.2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    ).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    losses, rates = [], []
    for x, y in images(run, 10):
        losses.append(step(x, y))
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    return losses, rates, model, optimizer


class ViT(nn.Module):
    def __init__(self, patch=4, width=24, classes=4):
        super().__init__()
        self.patch = nn.Conv2d(3, width, patch, patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.pos = nn.Parameter(torch.randn(1, 5, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 2, 48, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        return self.head(self.encoder(x)[:, 0])


@program
def vision_transformer_with_warm_up(run):
    model = ViT().to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    step = run.train_step(
        model,
        nn.CrossEntropyLoss(label_smoothing=0.1),
        optimizer,
        clip_norm=1.0,
        schedule=lambda i: 1e-3 * min(1.0, (i + 1) / 5),
    )
    return [step(x, y) for x, y in images(run, 10)], model, optimizer


@program
def mixup_from_numpy_in_the_loop(run):
    model = ConvNet().to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    losses = []
    for x, y in images(run, 10):
        lam = np.random.beta(0.4, 0.4)
        perm = torch.randperm(len(x)).to(run.device)
        one_hot = F.one_hot(y, 4).float()
        losses.append(step(lam * x + (1 - lam) * x[perm], lam * one_hot + (1 - lam) * one_hot[perm]))
    return losses, model


@program
def mixup_with_its_weight_in_the_loss_function(run):
    model = mlp(16, 32, 4).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    state = {"lam": 1.0, "y_b": None}

    def criterion(out, y_a):
        lam = state["lam"]
        return lam * F.cross_entropy(out, y_a) + (1 - lam) * F.cross_entropy(out, state["y_b"])

    step = run.train_step(model, criterion, optimizer)
    losses = []
    for x, y in vectors(run, 8):
        state["lam"] = float(np.random.beta(1.0, 1.0))
        perm = torch.randperm(len(x)).to(run.device)
        state["y_b"] = y[perm]
        losses.append(step(state["lam"] * x + (1 - state["lam"]) * x[perm], y))
    return losses, model


@program
def mixup_with_two_targets_and_a_weight_as_tensors(run):
    model = mlp(16, 32, 4).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def criterion(out, target):
        y_a, y_b, lam = target
        return (
            lam * F.cross_entropy(out, y_a, reduction="none")
            + (1 - lam) * F.cross_entropy(out, y_b, reduction="none")
        ).mean()

    step = run.train_step(model, criterion, optimizer)
    losses = []
    for x, y in vectors(run, 8):
        lam = torch.distributions.Beta(0.4, 0.4).sample((8,)).to(run.device)
        perm = torch.randperm(len(x)).to(run.device)
        mixed = lam[:, None] * x + (1 - lam[:, None]) * x[perm]
        losses.append(step(mixed, (y, y[perm], lam)))
    return losses, model


@program
def cutmix(run):
    model = ConvNet().to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    rng = np.random.default_rng(0)
    losses = []
    for x, y in images(run, 8):
        cut = int(8 * math.sqrt(1 - rng.beta(1.0, 1.0)))
        top, left = rng.integers(0, 8 - cut + 1), rng.integers(0, 8 - cut + 1)
        x = x.clone()
        x[:, :, top : top + cut, left : left + cut] = x.flip(0)[:, :, top : top + cut, left : left + cut]
        lam = 1 - cut * cut / 64
        target = lam * F.one_hot(y, 4).float() + (1 - lam) * F.one_hot(y.flip(0), 4).float()
        losses.append(step(x, target))
    return losses, model


class Augmented(nn.Module):
    """Flips and noise inside the model, as kornia does."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        if self.training:
            flip = torch.rand(x.shape[0], 1, 1, 1, device=x.device) < 0.5
            x = torch.where(flip, x.flip(-1), x) + 0.05 * torch.randn_like(x)
        return self.net(x)


@program
def augmentation_in_the_model(run):
    model = Augmented(ConvNet()).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    return [step(x, y) for x, y in images(run, 10)], model


def dice_loss(logits, target, eps=1.0):
    p = logits.sigmoid().flatten(1)
    t = target.flatten(1)
    return 1 - ((2 * (p * t).sum(1) + eps) / (p.sum(1) + t.sum(1) + eps)).mean()


class UNet(nn.Module):
    def __init__(self, out=1):
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.up, self.out = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(16, out, 1)

    def forward(self, x):
        a = F.relu(self.down1(x))
        b = F.relu(self.up(F.relu(self.down2(a))))
        return self.out(torch.cat([a, b], 1))


@program
def segmentation_with_dice_and_bce(run):
    model = UNet().to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = run.train_step(
        model, lambda out, t: dice_loss(out, t) + F.binary_cross_entropy_with_logits(out, t), optimizer
    )
    losses = [step(x, (x.mean(1, keepdim=True) > 0).float()) for x, _ in images(run, 8)]
    return losses, model


@program
def segmentation_with_ignored_pixels_and_poly_rate(run):
    model = UNet(out=5).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=8, power=0.9)
    step = run.train_step(model, nn.CrossEntropyLoss(ignore_index=255), optimizer)
    g = torch.Generator().manual_seed(0)
    losses = []
    for x, _ in images(run, 8):
        target = torch.randint(5, (4, 8, 8), generator=g)
        target[torch.rand(4, 8, 8, generator=g) < 0.2] = 255
        losses.append(step(x, target.to(run.device)))
        scheduler.step()
    return losses, model, optimizer


@program
def detection_head_with_boxes_and_scores(run):
    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Conv2d(3, 8, 3, padding=1)
            self.score, self.box = nn.Conv2d(8, 1, 1), nn.Conv2d(8, 4, 1)

        def forward(self, x):
            h = F.relu(self.body(x))
            return {"scores": self.score(h), "boxes": self.box(h)}

    def criterion(out, target):
        positive = target["objects"]
        scores = F.binary_cross_entropy_with_logits(out["scores"], positive)
        boxes = F.smooth_l1_loss(out["boxes"], target["boxes"], reduction="none") * positive
        return scores + boxes.sum() / positive.sum().clamp(min=1)

    model = Detector().to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = run.train_step(model, criterion, optimizer)
    g = torch.Generator().manual_seed(0)
    losses = []
    for x, _ in images(run, 8):
        objects = (torch.rand(4, 1, 8, 8, generator=g) < 0.1).float().to(run.device)
        boxes = torch.rand(4, 4, 8, 8, generator=g).to(run.device)
        losses.append(step(x, {"objects": objects, "boxes": boxes}))
    return losses, model


@program
def dice_that_selects_valid_pixels_by_mask(run):
    def criterion(out, target):
        valid = target >= 0
        return F.binary_cross_entropy_with_logits(out.squeeze(1)[valid], target[valid])

    model = UNet().to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = run.train_step(model, criterion, optimizer)
    losses = []
    for x, _ in images(run, 6):
        t = (x[:, 0] > 0).float()
        t[x[:, 1] > 1] = -1
        losses.append(step(x, t))
    return losses, model


@program
def spectral_norm_classifier(run):
    net = [nn.utils.parametrizations.spectral_norm(nn.Linear(16, 32)), nn.ReLU(), nn.Linear(32, 4)]
    model = nn.Sequential(*net).to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    return [step(x, y) for x, y in vectors(run, 10)], model


@program
def old_style_spectral_norm(run):
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(16, 32)), nn.ReLU(), nn.Linear(32, 4)).to(
        run.device
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    return [step(x, y) for x, y in vectors(run, 10)], model.state_dict()


@program
def weight_norm_conv(run):
    conv = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3))
    model = nn.Sequential(conv, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).to(
        run.device
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    return [step(x, y) for x, y in images(run, 8)], model


@program
def frozen_batch_norm_while_training(run):
    class FrozenNorms(ConvNet):
        def train(self, mode=True):
            super().train(mode)
            for module in self.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()
            return self

    model = FrozenNorms().to(run.device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    losses = []
    for _ in range(2):
        model.train()
        losses += [step(x, y) for x, y in images(run, 5)]
        model.eval()
    return losses, model


@program
def resolution_grows_while_training(run):
    model = ConvNet(norm=lambda c: nn.GroupNorm(2, c)).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    losses = []
    for size in (8, 12, 16):
        batches = images(run, 4, size=size)
        if size > 8:
            step.capture(*batches[0])
        losses += [step(x, y) for x, y in batches]
    return losses, model


@program
def running_accuracy_kept_by_the_criterion(run):
    class Criterion(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("correct", torch.zeros(()))
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, logits, target):
            with torch.no_grad():
                self.correct += (logits.argmax(-1) == target).sum()
                self.seen += len(target)
            return F.cross_entropy(logits, target)

    model, criterion = mlp(16, 24, 4).to(run.device), Criterion().to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = run.train_step(model, criterion, optimizer)
    losses, log = [], []
    for i, (x, y) in enumerate(vectors(run, 12)):
        losses.append(step(x, y))
        if i % 4 == 3:
            log.append((criterion.correct / criterion.seen).item())
            criterion.correct.zero_()
            criterion.seen.zero_()
    return losses, log, model


@program
def accuracy_kept_as_an_attribute_of_the_trainer(run):
    class Trainer:
        def __init__(self):
            self.model = mlp(16, 24, 4).to(run.device)
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
            self.accuracy = 0.0
            self.step = run.train_step(self.model, self.loss, self.optimizer)

        def loss(self, logits, target):
            self.accuracy = (logits.argmax(-1) == target).float().mean()
            return F.cross_entropy(logits, target)

        def fit(self, batches):
            log = []
            for x, y in batches:
                loss = self.step(x, y)
                log.append((loss.item(), float(self.accuracy)))
            return log

    trainer = Trainer()
    return trainer.fit(vectors(run, 10)), trainer.model


@program
def knowledge_distillation(run):
    teacher, student = mlp(16, 64, 4).to(run.device).eval(), mlp(16, 16, 4).to(run.device)
    teacher.requires_grad_(False)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)

    def criterion(logits, target):
        y, soft = target
        t = 3.0
        kd = F.kl_div(F.log_softmax(logits / t, -1), F.softmax(soft / t, -1), reduction="batchmean") * t * t
        return 0.5 * F.cross_entropy(logits, y) + 0.5 * kd

    step = run.train_step(student, criterion, optimizer)
    losses = []
    for x, y in vectors(run, 12):
        with torch.no_grad():
            soft = teacher(x)
        losses.append(step(x, (y, soft)))
    return losses, student, teacher


@program
def distillation_with_features_from_forward_hooks(run):
    teacher, student = mlp(16, 32, 4).to(run.device).eval(), mlp(16, 32, 4).to(run.device)
    features = {}
    student[1].register_forward_hook(lambda m, i, o: features.__setitem__("student", o))
    teacher[1].register_forward_hook(lambda m, i, o: features.__setitem__("teacher", o.detach()))
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05)

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = student, teacher

        def forward(self, x):
            with torch.no_grad():
                soft = self.teacher(x)
            return self.student(x), soft

    def criterion(outputs, y):
        logits, soft = outputs
        hint = F.mse_loss(features["student"], features["teacher"])
        return F.cross_entropy(logits, y) + hint + F.mse_loss(logits, soft)

    step = run.train_step(Both(), criterion, optimizer)
    return [step(x, y) for x, y in vectors(run, 10)], student, sorted(features)
