"""Trainers, checkpoints, callbacks, logging and data loading around the step."""

import copy
import functools
import io
import random
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from corpus.training_models import GPT, ConvNet, images, lm_loss, mlp, regression, seeded, tokens, vectors
from corpus.training_twice import program


@dataclass
class TrainerConfig:
    epochs: int = 3
    rate: float = 1e-2
    log_every: int = 4
    patience: int = 2


@dataclass
class TrainerState:
    step: int = 0
    epoch: int = 0
    history: list = field(default_factory=list)


class Callback:
    def on_epoch_end(self, trainer):
        pass

    def on_step_end(self, trainer, loss):
        pass


class Trainer:
    """A trainer with callbacks, as in many repositories."""

    def __init__(self, run, model, criterion, config, callbacks=()):
        self.run, self.config, self.callbacks = run, config, list(callbacks)
        self.model = model.to(run.device)
        self.criterion = criterion
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.rate)
        self.state, self.stop = TrainerState(), False
        self.train_step = run.train_step(self.model, self.compute_loss, self.optimizer, clip_norm=1.0)

    def compute_loss(self, outputs, targets):
        return self.criterion(outputs, targets)

    def fit(self, loader):
        for _ in range(self.config.epochs):
            self.model.train()
            for x, y in loader:
                loss = self.train_step(x, y)
                self.state.step += 1
                if self.state.step % self.config.log_every == 0:
                    self.state.history.append((self.state.step, loss.item()))
                for callback in self.callbacks:
                    callback.on_step_end(self, loss)
            self.state.epoch += 1
            for callback in self.callbacks:
                callback.on_epoch_end(self)
            if self.stop:
                break
        return self.state


class BestModel(Callback):
    def __init__(self, valid):
        self.valid, self.best, self.weights, self.bad = valid, float("inf"), None, 0

    @torch.no_grad()
    def on_epoch_end(self, trainer):
        trainer.model.eval()
        loss = sum(F.cross_entropy(trainer.model(x), y).item() for x, y in self.valid)
        self.bad = 0 if loss < self.best else self.bad + 1
        if loss < self.best:
            self.best, self.weights = loss, copy.deepcopy(trainer.model.state_dict())
        trainer.stop = self.bad >= trainer.config.patience


class LossMeter(Callback):
    def __init__(self):
        self.values, self.window = [], deque(maxlen=5)

    def on_step_end(self, trainer, loss):
        self.values.append(loss)
        self.window.append(loss.item())


@program
def trainer_with_early_stopping_and_best_weights(run):
    best, meter = BestModel(vectors(run, 2, seed=5)), LossMeter()
    trainer = Trainer(run, mlp(16, 24, 4), nn.CrossEntropyLoss(), TrainerConfig(), [best, meter])
    state = trainer.fit(vectors(run, 5))
    trainer.model.load_state_dict(best.weights)
    return state.history, state.step, best.best, meter.values, list(meter.window), trainer.model


@program
def early_stopping_restores_the_best_weights_and_goes_on(run):
    model = mlp(16, 24, 4).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    best, kept, losses = float("inf"), None, []
    for epoch in range(4):
        mean = sum(step(x, y).item() for x, y in vectors(run, 4, seed=epoch)) / 4
        losses.append(mean)
        if mean < best:
            best, kept = mean, {k: v.cpu().clone() for k, v in model.state_dict().items()}
        else:
            model.load_state_dict(kept)
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
    return losses, model


@program
def checkpoint_saved_and_loaded_in_the_middle(run):
    def build():
        torch.manual_seed(3)
        model = mlp(16, 24, 4, dropout=0.1).to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
        return model, optimizer, scheduler, run.train_step(model, nn.CrossEntropyLoss(), optimizer)

    batches, losses, file = vectors(run, 12), [], io.BytesIO()
    model, optimizer, scheduler, step = build()
    for x, y in batches[:6]:
        losses.append(step(x, y))
        scheduler.step()
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": step}
    torch.save({k: v.state_dict() for k, v in parts.items()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    model, optimizer, scheduler, step = build()
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    step.load_state_dict(saved["step"])
    for x, y in batches[6:]:
        losses.append(step(x, y))
        scheduler.step()
    return losses, model, optimizer, scheduler.get_last_lr()


@program
def checkpoint_loaded_with_weights_only(run):
    model = mlp(16, 24, 4).to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    for x, y in vectors(run, 6):
        step(x, y)
        scheduler.step()
    file = io.BytesIO()
    torch.save(
        {"m": model.state_dict(), "o": optimizer.state_dict(), "s": scheduler.state_dict(), "epoch": 6}, file
    )
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    other = mlp(16, 24, 4).to(run.device)
    other.load_state_dict(loaded["m"])
    plain = torch.optim.Adam(other.parameters())
    plain.load_state_dict(loaded["o"])
    losses = []
    for x, y in vectors(run, 4, seed=2):  # goes on without graphs
        loss = F.cross_entropy(other(x), y)
        plain.zero_grad()
        loss.backward()
        plain.step()
        losses.append(loss.detach())
    return losses, other, loaded["s"], plain


@program
def rollback_to_an_earlier_checkpoint_in_memory(run):
    model = mlp(16, 24, 4).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    batches = vectors(run, 12)
    losses = [step(x, y) for x, y in batches[:4]]
    snapshot = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    losses += [step(x, y) for x, y in batches[4:8]]
    model.load_state_dict(snapshot[0])
    optimizer.load_state_dict(snapshot[1])
    losses += [step(x, y) for x, y in batches[8:]]
    return losses, model, optimizer


@program
def pretrained_weights_loaded_before_training(run):
    source = mlp(16, 24, 4)
    model = mlp(16, 24, 4).to(run.device)
    missing = model.load_state_dict(
        {k: v for k, v in source.state_dict().items() if k.startswith("0.")}, strict=False
    )
    nn.init.zeros_(model[2].bias)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    return [step(x, y) for x, y in vectors(run, 8)], sorted(missing.missing_keys), model


class Rows(Dataset):
    def __init__(self, n=40):
        g = seeded()
        self.x, self.y = torch.randn(n, 16, generator=g), torch.randint(4, (n,), generator=g)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"x": self.x[i] + 0.01 * np.float32(np.random.randn()), "label": self.y[i]}


@program
def data_loader_of_dictionaries_with_a_smaller_last_batch(run):
    model = mlp(16, 24, 4).to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    loader = DataLoader(Rows(36), batch_size=8, shuffle=True)
    meters = defaultdict(list)
    for epoch in range(3):
        for batch in loader:
            x, y = batch["x"].float().to(run.device, non_blocking=True), batch["label"].to(run.device)
            meters[epoch].append(step(x, y))
    return dict(meters), model


@program
def data_loader_with_weighted_sampler_and_generator(run):
    g = seeded()
    data = TensorDataset(torch.randn(40, 16, generator=g), torch.randint(4, (40,), generator=g))
    sampler = WeightedRandomSampler(torch.rand(40, generator=g), 40, generator=g)
    loader = DataLoader(data, batch_size=8, sampler=sampler, drop_last=True)
    model = mlp(16, 24, 4).to(run.device)
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    losses = [step(x.to(run.device), y.to(run.device)) for _ in range(2) for x, y in loader]
    return losses, model


@program
def iterable_dataset_with_dropout_in_the_model(run):
    class Stream(IterableDataset):
        def __iter__(self):
            for _ in range(40):
                yield torch.randn(16), random.randrange(4)

    model = mlp(16, 24, 4, dropout=0.5).to(run.device)
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = [step(x.to(run.device), y.to(run.device)) for x, y in DataLoader(Stream(), batch_size=8)]
    return losses, model


@program
def buckets_of_lengths_with_a_batch_sampler(run):
    g = seeded()
    texts = [torch.randint(1, 32, (int(n),), generator=g) for n in torch.randint(4, 17, (32,), generator=g)]
    order = sorted(range(32), key=lambda i: len(texts[i]))
    buckets = [order[i : i + 4] for i in range(0, 32, 4)]
    random.shuffle(buckets)

    def collate(batch):
        ids = nn.utils.rnn.pad_sequence(batch, batch_first=True)
        return ids[:, :-1].contiguous(), ids[:, 1:].masked_fill(ids[:, 1:] == 0, -100).contiguous()

    model = GPT(layers=1).to(run.device)
    step = run.train_step(
        model, lm_loss, torch.optim.AdamW(model.parameters(), lr=1e-3), ladder=[4, 8, 12, 16]
    )
    loader = DataLoader(texts, batch_sampler=buckets, collate_fn=collate)
    return [step(x.to(run.device), y.to(run.device)) for x, y in loader], model


@program
def infinite_iterator_over_a_loader(run):
    def forever(loader):
        while True:
            yield from loader

    g = seeded()
    loader = DataLoader(
        TensorDataset(torch.randn(24, 16, generator=g), torch.randint(4, (24,), generator=g)), 8, True
    )
    model, stream = mlp(16, 24, 4).to(run.device), forever(loader)
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters()))
    losses = []
    for _ in range(10):
        x, y = next(stream)
        losses.append(step(x.to(run.device), y.to(run.device)))
    return losses, model


class Batch(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@program
def named_tuples_as_batches_and_targets(run):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(16, 24, 5)

        def forward(self, x):
            out = self.net(x)
            return {"logits": out[:, :4], "value": out[:, 4]}

    def criterion(out, target):
        return F.cross_entropy(out["logits"], target.y) + F.mse_loss(out["value"], target.x.mean(-1))

    model = Net().to(run.device)
    step = run.train_step(model, criterion, torch.optim.Adam(model.parameters(), lr=1e-2))
    losses = []
    for batch in (Batch(x, y) for x, y in vectors(run, 8)):
        losses.append(step(batch.x, batch))
    return losses, model


@program
def several_losses_returned_in_a_tuple_for_the_log(run):
    def criterion(out, y):
        ce, l2 = F.cross_entropy(out, y), 1e-3 * out.pow(2).mean()
        return ce + l2, {"ce": ce.detach(), "l2": l2.detach()}

    model = mlp(16, 24, 4).to(run.device)
    step = run.train_step(model, criterion, torch.optim.Adam(model.parameters(), lr=1e-2))
    losses, logs, kept = [], [], []
    for x, y in vectors(run, 8):
        loss, log = step(x, y)
        losses.append(loss)
        logs.append({k: v.item() for k, v in log.items()})
        kept.append(log)
    return losses, logs, kept, model


@program
def several_losses_returned_as_a_dictionary_with_an_entry_loss(run):
    class Criterion(nn.Module):
        def forward(self, out, y):
            terms = {
                "ce": F.cross_entropy(out, y),
                "entropy": -(out.softmax(-1) * out.log_softmax(-1)).sum(-1).mean(),
            }
            return {"loss": terms["ce"] - 0.01 * terms["entropy"], **terms}

    model = mlp(16, 24, 4, dropout=0.1).to(run.device)
    step = run.train_step(model, Criterion(), torch.optim.AdamW(model.parameters(), lr=1e-2), accumulate=2)
    totals = defaultdict(float)
    for x, y in vectors(run, 10):
        for name, value in step(x, y).items():
            totals[name] += value.item()
    return dict(totals), model


@program
def accuracy_and_loss_over_batches_of_several_lengths(run):
    def criterion(logits, targets):
        real = targets != -100
        hits = ((logits.argmax(-1) == targets) & real).sum()
        return lm_loss(logits, targets), hits, real.sum()

    model = GPT(layers=1).to(run.device)
    step = run.train_step(model, criterion, torch.optim.AdamW(model.parameters(), lr=1e-2), ladder=[8, 16])
    losses, hits, count = [], 0, 0
    for x, y in tokens(run, [16, 8, 5, 12, 16, 8, 13]):
        loss, right, real = step(x, y)
        losses.append(loss)
        hits += right
        count += real
    return losses, (hits / count).item(), model


@program
def confusion_matrix_from_returned_predictions(run):
    model = mlp(16, 24, 4).to(run.device)
    step = run.train_step(
        model,
        lambda out, y: (F.cross_entropy(out, y), out.argmax(-1)),
        torch.optim.Adam(model.parameters(), lr=1e-2),
    )
    matrix, kept = torch.zeros(4, 4, dtype=torch.long), []
    for x, y in vectors(run, 10):
        _, predicted = step(x, y)
        kept.append(predicted)
        matrix += torch.bincount(4 * y.cpu() + predicted.cpu(), minlength=16).view(4, 4)
    return matrix, kept, model


@program
def accelerate_with_a_prepared_loader_and_scheduler(run):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=run.device.type == "cpu")
    g = seeded()
    data = TensorDataset(torch.randn(40, 16, generator=g), torch.randint(4, (40,), generator=g))
    model = mlp(16, 24, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 10)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(data, 8), scheduler
    )
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer, clip_norm=1.0)
    losses, rates = [], []
    for _ in range(2):
        for x, y in loader:
            losses.append(step(x, y))
            scheduler.step()
            rates.append(scheduler.get_last_lr()[0])
    return losses, rates, accelerator.unwrap_model(model)


@program
def several_losses_kept_in_a_dictionary_for_the_log(run):
    log = {}

    def criterion(out, y):
        log["ce"], log["l2"] = F.cross_entropy(out, y), 1e-3 * out.pow(2).mean()
        return sum(log.values())

    model = mlp(16, 24, 4).to(run.device)
    step = run.train_step(model, criterion, torch.optim.Adam(model.parameters(), lr=1e-2))
    losses, lines = [], []
    for i, (x, y) in enumerate(vectors(run, 8)):
        losses.append(step(x, y))
        if i % 2 == 1:
            lines.append({k: round(v.item(), 3) for k, v in log.items()})
    return losses, lines, model


@program
def several_losses_appended_to_a_list_for_the_log(run):
    terms = []

    def criterion(out, y):
        terms.append(F.cross_entropy(out, y).detach())
        return F.cross_entropy(out, y) + 1e-3 * out.pow(2).mean()

    model = mlp(16, 24, 4).to(run.device)
    step = run.train_step(model, criterion, torch.optim.Adam(model.parameters(), lr=1e-2))
    losses = [step(x, y) for x, y in vectors(run, 8)]
    return losses, terms, model


@program
def average_meters_on_the_device(run):
    class Meter:
        def __init__(self, device):
            self.total, self.count = torch.zeros((), device=device), 0

        def update(self, value, n):
            self.total += value * n
            self.count += n

        @property
        def mean(self):
            return (self.total / self.count).item()

    model = ConvNet().to(run.device)
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.05))
    means = []
    for epoch in range(3):
        meter = Meter(run.device)
        for x, y in images(run, 4, seed=epoch):
            meter.update(step(x, y), len(x))
        means.append(meter.mean)
    return means, model


@program
def progress_bar_of_tqdm(run):
    from tqdm import tqdm

    model, text = mlp(16, 24, 4).to(run.device), io.StringIO()
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=1e-2))
    bar, losses = tqdm(vectors(run, 10), desc="train", file=text, mininterval=0), []
    for x, y in bar:
        loss = step(x, y)
        losses.append(loss)
        bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
    return losses, model


@program
def timed_and_profiled(run):
    model = mlp(16, 24, 4).to(run.device)
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=1e-2))
    losses, seconds, batches = [], [], vectors(run, 10)
    for x, y in batches[:5]:
        begun = time.perf_counter()
        losses.append(step(x, y))
        seconds.append(time.perf_counter() - begun)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for x, y in batches[5:]:
            with torch.profiler.record_function("train_step"):
                losses.append(step(x, y))
    table = {event.key: event.count for event in profile.key_averages()}
    return losses, all(s >= 0 for s in seconds), table["train_step"], model


@program
def profiler_around_the_first_steps(run):
    model = mlp(16, 24, 4).to(run.device)
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=1e-2))
    losses = []
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule
    ) as profile:
        for x, y in vectors(run, 6):
            losses.append(step(x, y))
            profile.step()
    return losses, model


@program
def anomaly_detection_switched_on(run):
    model = mlp(16, 24, 4).to(run.device)
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=1e-2))
    with torch.autograd.set_detect_anomaly(True):
        losses = [step(x, y) for x, y in vectors(run, 6)]
    return losses, model


@program
def activations_counted_by_forward_hooks(run):
    model = mlp(16, 24, 4).to(run.device)
    statistics = defaultdict(list)

    def hook(name):
        def keep(module, inputs, output):
            statistics[name].append(output.detach().std())

        return keep

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(hook(name))
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=1e-2))
    losses = [step(x, y) for x, y in vectors(run, 6)]
    return losses, {k: len(v) for k, v in statistics.items()}, [v[-1] for v in statistics.values()]


@program
def hook_removed_after_the_first_batch(run):
    model, shapes = mlp(16, 24, 4).to(run.device), []
    handles = [m.register_forward_hook(lambda m, i, o: shapes.append(tuple(o.shape))) for m in model]
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=1e-2))
    losses = []
    for i, (x, y) in enumerate(vectors(run, 8)):
        losses.append(step(x, y))
        if i == 0:
            for handle in handles:
                handle.remove()
    return losses, shapes, model


@program
def gradients_logged_by_tensor_hooks(run):
    model, norms = mlp(16, 24, 4).to(run.device), []
    model[0].weight.register_hook(lambda g: norms.append(g.norm()))
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    losses = [step(x, y) for x, y in vectors(run, 6)]
    return losses, norms, model


@program
def moving_average_of_weights_with_a_hand_written_class(run):
    class EMA:
        def __init__(self, model, decay):
            self.decay, self.shadow = decay, {n: p.detach().clone() for n, p in model.named_parameters()}

        @torch.no_grad()
        def update(self, model):
            for n, p in model.named_parameters():
                self.shadow[n].mul_(self.decay).add_(p, alpha=1 - self.decay)

        def swap(self, model):
            for n, p in model.named_parameters():
                p.data, self.shadow[n] = self.shadow[n], p.data

    model = mlp(16, 24, 4).to(run.device)
    ema = EMA(model, 0.9)
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=1e-2))
    losses, held_out, batches = [], [], vectors(run, 8)
    for x, y in batches:
        losses.append(step(x, y))
        ema.update(model)
    ema.swap(model)
    with torch.no_grad():
        held_out.append(F.cross_entropy(model(batches[0][0]), batches[0][1]).item())
    ema.swap(model)
    return losses, held_out, ema.shadow, model


@program
def average_swapped_in_by_data_for_every_validation(run):
    model = mlp(16, 24, 4).to(run.device)
    average = copy.deepcopy(model).requires_grad_(False)
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=1e-2))
    losses, held_out, batches = [], [], vectors(run, 4)
    for _ in range(3):
        for x, y in batches:
            losses.append(step(x, y))
            for a, p in zip(average.parameters(), model.parameters(), strict=True):
                a.data.lerp_(p.data, 0.1)
        backup = [p.data for p in model.parameters()]
        for p, a in zip(model.parameters(), average.parameters(), strict=True):
            p.data = a.data
        with torch.no_grad():
            held_out.append(F.cross_entropy(model(batches[0][0]), batches[0][1]).item())
        for p, b in zip(model.parameters(), backup, strict=True):
            p.data = b
    return losses, held_out, model


@program
def validation_with_the_same_model_in_eval_mode_every_few_steps(run):
    model = mlp(16, 24, 4, dropout=0.3).to(run.device)
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=1e-2))
    losses, held_out, valid = [], [], vectors(run, 2, rows=5, seed=3)
    for i, (x, y) in enumerate(vectors(run, 12)):
        losses.append(step(x, y))
        if i % 4 == 3:
            model.eval()
            with torch.inference_mode():
                held_out.append(sum((model(a).argmax(-1) == b).float().mean().item() for a, b in valid))
            model.train()
    return losses, held_out, model


@program
def eval_mode_forgotten_until_the_next_epoch(run):
    model = mlp(16, 24, 4, dropout=0.3).to(run.device)
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=1e-2))
    losses = []
    for epoch in range(3):
        for i, (x, y) in enumerate(vectors(run, 4, seed=epoch)):
            if i == 2:
                model.eval()
            losses.append(step(x, y))
        model.train()
    return losses, model


@program
def k_fold_cross_validation(run):
    data, scores = vectors(run, 6), []
    for fold in range(3):
        torch.manual_seed(fold)
        model = mlp(16, 24, 4).to(run.device)
        step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=1e-2))
        for x, y in (b for i, b in enumerate(data) if i % 3 != fold):
            step(x, y)
        with torch.no_grad():
            scores.append(sum(F.cross_entropy(model(x), y).item() for x, y in data[fold::3]))
    return scores


@program
def ensemble_of_models_in_turns(run):
    models = [mlp(16, 24, 4).to(run.device) for _ in range(3)]
    steps = [
        run.train_step(m, nn.CrossEntropyLoss(), torch.optim.Adam(m.parameters(), lr=1e-2)) for m in models
    ]
    losses = [[s(x, y) for s in steps] for x, y in vectors(run, 6)]
    return losses, models


@program
def sweep_over_rates_in_one_process(run):
    start, results = mlp(16, 24, 4).to(run.device), {}
    for rate in (1e-3, 1e-2, 1e-1):
        model = copy.deepcopy(start)
        step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=rate))
        results[str(rate)] = [step(x, y) for x, y in vectors(run, 5)]
    return results


@program
def seed_set_before_each_epoch(run):
    model = mlp(16, 24, 4, dropout=0.3).to(run.device)
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=1e-2))
    losses = []
    for epoch in range(3):
        torch.manual_seed(100 + epoch)
        losses += [step(x, y) for x, y in vectors(run, 4)]
    return losses, torch.rand(3), model


@program
def random_numbers_after_training_are_the_same(run):
    model = mlp(16, 24, 4).to(run.device)
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters()))
    losses = [step(x + torch.randn_like(x), y) for x, y in vectors(run, 5)]
    return losses, torch.rand(3), random.random(), np.random.rand(), torch.rand(2, device=run.device)


@program
def loss_weight_of_a_curriculum_raised_every_epoch(run):
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = 0.0

        def forward(self, out, y):
            return F.cross_entropy(out, y) + self.weight * out.pow(2).mean()

    criterion, model = Loss(), mlp(16, 24, 4).to(run.device)
    step = run.train_step(model, criterion, torch.optim.Adam(model.parameters(), lr=1e-2))
    losses = []
    for epoch in range(4):
        criterion.weight = 0.05 * epoch
        losses += [step(x, y) for x, y in vectors(run, 4)]
    return losses, model


@program
def the_same_curriculum_captured_again_every_epoch(run):
    class Loss(nn.Module):
        weight = 0.0

        def forward(self, out, y):
            return F.cross_entropy(out, y) + self.weight * out.pow(2).mean()

    criterion, model = Loss(), mlp(16, 24, 4).to(run.device)
    step = run.train_step(model, criterion, torch.optim.Adam(model.parameters(), lr=1e-2))
    losses, batches = [], vectors(run, 5)
    for epoch in range(3):
        criterion.weight = 0.05 * epoch
        if epoch:
            step.capture(*batches[0])
        losses += [step(x, y) for x, y in batches]
    return losses, model


@program
def dropout_annealed_through_its_probability(run):
    model = mlp(16, 24, 4, dropout=0.5).to(run.device)
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=1e-2))
    losses = []
    for epoch in range(3):
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.5 - 0.2 * epoch
        losses += [step(x, y) for x, y in vectors(run, 4)]
    return losses, model


@program
def global_step_counted_in_forward(run):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.calls = mlp(16, 24, 4), 0

        def forward(self, x):
            self.calls += 1
            return self.net(x)

    model = Counting().to(run.device)
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=1e-2))
    losses = [step(x, y) for x, y in vectors(run, 8)]
    return losses, model.calls


@program
def loss_from_a_partial_with_settings(run):
    def blend(out, y, alpha, power):
        return (1 - alpha) * F.cross_entropy(out, y) + alpha * out.abs().pow(power).mean()

    model = mlp(16, 24, 4).to(run.device)
    loss = functools.partial(blend, alpha=0.1, power=1.5)
    step = run.train_step(model, loss, torch.optim.Adam(model.parameters(), lr=1e-2))
    return [step(x, y) for x, y in vectors(run, 8)], model


@program
def wrong_labels_raise_what_they_raise(run):
    if run.device.type != "cpu":
        return "a device assertion ends the process"
    model = mlp(16, 24, 4).to(run.device)
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters()))
    losses = [step(x, y) for x, y in vectors(run, 3)]
    try:
        x, y = vectors(run, 1)[0]
        step(x, y + 9)
    except IndexError as error:
        losses.append(str(error))
    losses += [step(x, y) for x, y in vectors(run, 3, seed=3)]
    return losses, model


@program
def wrong_width_raises_what_it_raises(run):
    model = mlp(16, 24, 4).to(run.device)
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters()))
    losses = [step(x, y) for x, y in vectors(run, 3)]
    try:
        step(*vectors(run, 1, width=12)[0])
    except RuntimeError as error:
        losses.append(str(error))
    losses += [step(x, y) for x, y in vectors(run, 3, seed=3)]
    return losses, model


@program
def keyboard_interrupt_in_the_loop_and_on_again(run):
    model = mlp(16, 24, 4).to(run.device)
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=1e-2))
    losses, batches = [], vectors(run, 8)
    try:
        for i, (x, y) in enumerate(batches):
            if i == 4:
                raise KeyboardInterrupt
            losses.append(step(x, y))
    except KeyboardInterrupt:
        losses.append("interrupted")
    losses += [step(x, y) for x, y in batches[4:]]
    return losses, model


@program
def loss_kept_with_the_batch_for_hard_examples(run):
    model = mlp(16, 24, 1).to(run.device)
    step = run.train_step(model, F.mse_loss, torch.optim.Adam(model.parameters(), lr=1e-2))
    batches = regression(run, 8)
    ranking = sorted(((step(x, y).item(), i) for i, (x, y) in enumerate(batches)), reverse=True)
    again = [step(*batches[i]) for _, i in ranking[:3]]
    return [i for _, i in ranking], again, model


@program
def weights_pruned_by_a_mask_in_the_loop(run):
    model = mlp(16, 24, 4).to(run.device)
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    losses, masks = [], {n: torch.ones_like(p) for n, p in model.named_parameters()}
    for i, (x, y) in enumerate(vectors(run, 9)):
        losses.append(step(x, y))
        with torch.no_grad():
            for n, p in model.named_parameters():
                if i == 3 and p.dim() > 1:
                    masks[n].copy_((p.abs() > p.abs().median()).float())
                p.mul_(masks[n])
    return losses, {n: int(m.sum()) for n, m in masks.items()}, model


@program
def weights_pruned_with_torchs_module(run):
    from torch.nn.utils import prune

    model = mlp(16, 24, 4).to(run.device)
    for module in (model[0], model[2]):
        prune.l1_unstructured(module, "weight", amount=0.5)
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    losses = [step(x, y) for x, y in vectors(run, 8)]
    return losses, model.state_dict()


@program
def parameters_reset_in_the_middle(run):
    model = mlp(16, 24, 4).to(run.device)
    step = run.train_step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for i, (x, y) in enumerate(vectors(run, 8)):
        if i == 4:
            model[2].reset_parameters()
        losses.append(step(x, y))
    return losses, model


@program
def layers_added_while_training(run):
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.layers, self.out = nn.Linear(16, 24), nn.ModuleList(), nn.Linear(24, 4)

        def forward(self, x):
            h = self.inp(x)
            for layer in self.layers:
                h = h + layer(F.relu(h))
            return self.out(h)

    model = Growing().to(run.device)
    losses = []
    for stage in range(3):
        if stage:
            model.layers.append(nn.Linear(24, 24).to(run.device))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
        losses += [step(x, y) for x, y in vectors(run, 4, seed=stage)]
    return losses, model
