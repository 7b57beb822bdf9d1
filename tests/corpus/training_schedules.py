"""Learning rate schedules, accumulation, clipping, mixed precision."""

import json
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from corpus.training_models import GPT, ConvNet, images, lm_loss, mlp, tokens, vectors
from corpus.training_twice import program


def scheduled(run, make, steps=12, optimizer=torch.optim.SGD, lr=0.1, **options):
    """One scheduler step after each training step, rates kept as people keep them."""
    model = mlp(16, 24, 4, act=nn.Tanh).to(run.device)
    optimizer = optimizer(model.parameters(), lr=lr, **options)
    scheduler = make(optimizer)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    losses, rates, last = [], [], []
    for x, y in vectors(run, steps):
        losses.append(step(x, y))
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
        last.extend(scheduler.get_last_lr())
    return losses, rates, last, model, optimizer, scheduler.state_dict()["last_epoch"]


@program
def step_lr(run):
    return scheduled(run, lambda o: lr_scheduler.StepLR(o, 4, 0.5))


@program
def multi_step_lr(run):
    return scheduled(run, lambda o: lr_scheduler.MultiStepLR(o, [3, 7], 0.1), momentum=0.9)


@program
def exponential_lr_on_adam(run):
    return scheduled(run, lambda o: lr_scheduler.ExponentialLR(o, 0.9), optimizer=torch.optim.Adam, lr=1e-2)


@program
def constant_and_linear_lr_in_sequence(run):
    def make(o):
        warm, down = lr_scheduler.LinearLR(o, 0.1, 1.0, 4), lr_scheduler.CosineAnnealingLR(o, 8)
        return lr_scheduler.SequentialLR(o, [warm, down], [4])

    return scheduled(run, make, optimizer=torch.optim.AdamW, lr=1e-2)


@program
def chained_schedulers(run):
    def make(o):
        return lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(o, 0.1, 3), lr_scheduler.ExponentialLR(o, 0.9)]
        )

    model = mlp(16, 24, 4).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = make(optimizer)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    losses, rates = [], []
    for x, y in vectors(run, 10):
        losses.append(step(x, y))
        scheduler.step()
        rates.append(scheduler.get_last_lr())
    return losses, rates, model


@program
def cosine_warm_restarts_by_fractions_of_an_epoch(run):
    model = mlp(16, 24, 4).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=2, T_mult=2)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    losses, rates, batches = [], [], vectors(run, 4)
    for epoch in range(3):
        for i, (x, y) in enumerate(batches):
            losses.append(step(x, y))
            scheduler.step(epoch + i / len(batches))
            rates.append(round(float(optimizer.param_groups[0]["lr"]), 8))
    return losses, rates, model


@program
def one_cycle_with_cycled_momentum(run):
    return scheduled(
        run,
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=13),
        optimizer=torch.optim.AdamW,
        lr=1e-3,
    )


@program
def one_cycle_without_cycled_momentum(run):
    return scheduled(
        run,
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=13, cycle_momentum=False),
        optimizer=torch.optim.Adam,
    )


@program
def cyclic_lr_triangular(run):
    return scheduled(
        run, lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, mode="triangular2"), momentum=0.9
    )


@program
def polynomial_lr_on_rmsprop(run):
    return scheduled(
        run, lambda o: lr_scheduler.PolynomialLR(o, 12, 2.0), optimizer=torch.optim.RMSprop, lr=1e-2
    )


@program
def multiplicative_lr_on_adagrad(run):
    return scheduled(
        run, lambda o: lr_scheduler.MultiplicativeLR(o, lambda e: 0.95), optimizer=torch.optim.Adagrad
    )


@program
def inverse_square_root_lambda(run):
    return scheduled(
        run,
        lambda o: lr_scheduler.LambdaLR(o, lambda i: min((i + 1) ** -0.5, (i + 1) * 4**-1.5)),
        optimizer=torch.optim.NAdam,
        lr=1e-2,
    )


@program
def cosine_per_epoch_with_validation_loss(run):
    model = mlp(16, 24, 4).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=4, eta_min=1e-4)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    (xv, yv), log = vectors(run, 1, rows=32, seed=9)[0], []
    for epoch in range(4):
        model.train()
        losses = [float(step(x, y)) for x, y in vectors(run, 4, seed=epoch)]
        model.eval()
        with torch.inference_mode():
            held_out = F.cross_entropy(model(xv), yv).item()
        log.append(
            {
                "epoch": epoch,
                "train": sum(losses) / 4,
                "valid": held_out,
                "lr": optimizer.param_groups[0]["lr"],
            }
        )
        scheduler.step()
    return log, model, scheduler.get_last_lr()


@program
def log_of_rates_written_as_json(run):
    model = mlp(16, 24, 4).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = lr_scheduler.StepLR(optimizer, 2, 0.5)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    lines = []
    for i, (x, y) in enumerate(vectors(run, 8)):
        loss = step(x, y)
        lines.append(json.dumps({"step": i, "lr": scheduler.get_last_lr()[0], "loss": round(loss.item(), 3)}))
        scheduler.step()
    return lines, json.dumps(scheduler.state_dict()["_last_lr"])


@program
def reduce_on_plateau(run):
    model = mlp(16, 24, 4).to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5, threshold=0.05)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    rates = []
    for epoch in range(6):
        mean = sum(step(x, y).item() for x, y in vectors(run, 3, seed=epoch)) / 3
        scheduler.step(mean)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates, model, scheduler.num_bad_epochs


@program
def rates_set_by_hand_in_the_groups(run):
    model = mlp(16, 24, 4).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    losses = []
    for i, (x, y) in enumerate(vectors(run, 12)):
        if i % 4 == 0:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        losses.append(step(x, y))
    return losses, optimizer.param_groups[0]["lr"], model


@program
def learning_rate_finder(run):
    model = mlp(16, 24, 4).to(run.device)
    start = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    curve, smoothed, best = [], 0.0, float("inf")
    for i, (x, y) in enumerate(vectors(run, 12)):
        rate = 1e-4 * (1e5 ** (i / 11))
        optimizer.param_groups[0]["lr"] = rate
        smoothed = 0.9 * smoothed + 0.1 * step(x, y).item()
        corrected = smoothed / (1 - 0.9 ** (i + 1))
        best = min(best, corrected)
        curve.append((rate, corrected))
        if corrected > 4 * best:
            break
    model.load_state_dict(start)
    return curve, model


@program
def rates_of_two_groups_by_schedule(run):
    model = mlp(16, 24, 4).to(run.device)
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    step = run.train_step(
        model,
        nn.CrossEntropyLoss(),
        optimizer,
        schedule=lambda i: [1e-3 * 0.9**i, 1e-2 * min(1, (i + 1) / 5)],
    )
    return [step(x, y) for x, y in vectors(run, 10)], model, optimizer


@program
def swa_with_its_own_scheduler_and_batch_norm_update(run):
    model = ConvNet().to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    average = torch.optim.swa_utils.AveragedModel(model)
    swa = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.01, anneal_epochs=2)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    batches, losses = images(run, 4), []
    for epoch in range(4):
        losses += [step(x, y) for x, y in batches]
        if epoch >= 2:
            average.update_parameters(model)
            swa.step()
    torch.optim.swa_utils.update_bn([x for x, _ in batches], average)
    return losses, model, average, optimizer.param_groups[0]["lr"]


@program
def warm_up_of_a_library_like_pytorch_warmup(run):
    class Warmup:
        """Dampens the rates of a scheduler inside its context."""

        def __init__(self, optimizer, period):
            self.optimizer, self.period, self.count = optimizer, period, 0
            self.lrs = [g["lr"] for g in optimizer.param_groups]
            self.dampen()

        def dampen(self):
            self.count += 1
            for g in self.optimizer.param_groups:
                g["lr"] = g["lr"] * min(1.0, self.count / self.period)

        def __enter__(self):
            for g, lr in zip(self.optimizer.param_groups, self.lrs, strict=True):
                g["lr"] = lr

        def __exit__(self, *_):
            self.lrs = [g["lr"] for g in self.optimizer.param_groups]
            self.dampen()

    model = mlp(16, 24, 4).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 12)
    warmup = Warmup(optimizer, 5)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    losses, rates = [], []
    for x, y in vectors(run, 10):
        losses.append(step(x, y))
        with warmup:
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return losses, rates, model


@program
def accumulation_with_a_shorter_last_one(run):
    model = mlp(16, 24, 4).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer, accumulate=4)
    losses = []
    for epoch in range(2):
        batches = vectors(run, 10, seed=epoch)
        for i, (x, y) in enumerate(batches):
            losses.append(step(x, y, last=i == len(batches) - 1))
    return losses, model, step


@program
def accumulation_flushed_after_the_epoch(run):
    model = mlp(16, 24, 4).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer, accumulate=3, clip_norm=1.0)
    losses = []
    for epoch in range(2):
        losses += [step(x, y) for x, y in vectors(run, 8, seed=epoch)]
        step.flush()
    return losses, model, step


@program
def accumulation_with_a_scheduler_per_update(run):
    model = GPT(layers=1).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 4)
    step = run.train_step(model, lm_loss, optimizer, accumulate=2)
    losses = []
    for i, (x, y) in enumerate(tokens(run, [12] * 12)):
        losses.append(step(x, y))
        if i % 2 == 1:
            scheduler.step()
    return losses, model, scheduler.get_last_lr()


@program
def gradient_norms_logged(run):
    model = mlp(16, 24, 4).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer, clip_norm=0.5)
    norms = []
    for x, y in vectors(run, 10):
        step(x, y)
        norms.append(float(step.grad_norm))
    return norms, model


@program
def gradient_norms_kept_as_tensors(run):
    model = mlp(16, 24, 4).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer, clip_norm=0.5)
    norms = []
    for x, y in vectors(run, 8):
        step(x, y)
        norms.append(step.grad_norm)
    return torch.stack(norms), model


@program
def gradients_inspected_after_each_step(run):
    model = mlp(16, 24, 4).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    log = []
    for x, y in vectors(run, 8):
        step(x, y)
        log.append({n: p.grad.abs().mean().item() for n, p in model.named_parameters()})
    return log, model


@program
def a_batch_with_nan_is_skipped(run):
    model = mlp(16, 24, 4).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    losses = []
    for i, (x, y) in enumerate(vectors(run, 10)):
        if i == 5:
            x = x.clone()
            x[0, 0] = float("nan")
        losses.append(step(x, y))
    return losses, model, optimizer, step


@program
def stops_when_the_loss_is_not_finite(run):
    model = mlp(16, 24, 1).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = run.train_step(model, lambda out, y: torch.exp(out.pow(2)).mean(), optimizer)
    losses = []
    for x, y in vectors(run, 10):
        loss = step(100 * x if len(losses) == 4 else x, y)
        if not torch.isfinite(loss):
            break
        losses.append(loss.item())
    return losses, len(losses)


@program
def raises_on_a_loss_that_is_not_finite(run):
    model = mlp(16, 24, 1).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = run.train_step(model, lambda out, y: torch.exp(out.pow(2)).mean(), optimizer)
    try:
        for i, (x, y) in enumerate(vectors(run, 10)):
            loss = step(100 * x if i == 4 else x, y)
            if not math.isfinite(loss.item()):
                raise FloatingPointError(f"Loss is {loss.item()}, stopping training at step {i}")
    except FloatingPointError as error:
        return str(error), model


@program
def grad_scaler_in_float16(run):
    model = mlp(16, 24, 4).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(run.device.type, init_scale=2.0**10, growth_interval=4)
    step = run.train_step(
        model, nn.CrossEntropyLoss(), optimizer, autocast=torch.float16, scaler=scaler, clip_norm=1.0
    )
    losses, scales = [], []
    for x, y in vectors(run, 12):
        losses.append(step(x, y))
        scales.append(scaler.get_scale())
    return losses, scales


@program
def grad_scaler_that_overflows_once(run):
    model = mlp(16, 24, 4).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(run.device.type, init_scale=1024.0, growth_interval=100)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer, scaler=scaler)
    losses, scales = [], []
    for i, (x, y) in enumerate(vectors(run, 10)):
        losses.append(step(x * (float("inf") if i == 4 else 1.0), y))
        scales.append(scaler.get_scale())
    return losses[:4] + losses[5:], scales, model


@program
def bfloat16_autocast_with_accumulation(run):
    model = GPT(layers=1).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = run.train_step(
        model,
        lm_loss,
        optimizer,
        autocast=torch.bfloat16,
        accumulate=2,
        clip_norm=1.0,
        schedule=lambda i: 1e-3 * 0.9**i,
    )
    return [step(x, y) for x, y in tokens(run, [12] * 10)], step


@program
def batch_size_doubles(run):
    model = mlp(16, 24, 4).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    losses = []
    for rows in (4, 8, 16):
        batches = vectors(run, 4, rows=rows)
        step.capture(*batches[0])
        losses += [step(x, y) for x, y in batches]
    return losses, model


@program
def batch_size_doubles_and_nobody_captures_again(run):
    model = mlp(16, 24, 4).to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = run.train_step(model, nn.CrossEntropyLoss(), optimizer)
    losses = []
    for rows in (4, 8, 16):
        losses += [step(x, y) for x, y in vectors(run, 4, rows=rows)]
    return losses, model
