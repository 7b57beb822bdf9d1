"""Parts of models from graphs, with everything in between as usual: `make_graphed_callables`."""

import copy
import random

import torch
from torch import nn
from torch.nn import functional as F

from corpus.training_models import GPT, ConvNet, images, lm_loss, mlp, regression, seeded, tokens, vectors
from corpus.training_twice import program


def loop(model, optimizer, batches, loss_fn=F.cross_entropy, clip=None):
    """The usual loop over something called like a model."""
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


@program
def a_whole_network(run):
    model, batches = mlp(16, 24, 4).to(run.device), vectors(run, 10)
    net = run.parts(model, (batches[0][0],))
    return loop(net, torch.optim.Adam(model.parameters(), lr=1e-2), batches), model.state_dict()


@program
def a_network_in_evaluation_and_training(run):
    model, batches = mlp(16, 24, 4, dropout=0.2).to(run.device), vectors(run, 8)
    net = run.parts(model, (batches[0][0],))
    optimizer, scores = torch.optim.SGD(model.parameters(), lr=0.1), []
    losses = []
    for _ in range(2):
        net.train()
        losses += loop(net, optimizer, batches)
        net.eval()
        with torch.no_grad():
            scores.append((net(batches[0][0]).argmax(-1) == batches[0][1]).float().mean().item())
    return losses, scores, model.state_dict()


@program
def encoder_and_decoder_with_a_sum_between(run):
    encoder, decoder = mlp(16, 24, 8).to(run.device), mlp(8, 24, 16).to(run.device)
    batches = vectors(run, 10)
    sample = torch.randn(8, 8, device=run.device, requires_grad=True)
    e, d = run.parts((encoder, decoder), ((batches[0][0],), (sample,)))
    optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], lr=1e-2)
    losses = []
    for x, _ in batches:
        optimizer.zero_grad()
        code = e(x)
        code = code + 0.1 * torch.randn_like(code)
        loss = F.mse_loss(d(code), x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, encoder.state_dict(), decoder.state_dict()


@program
def backbone_from_graphs_and_eager_head_that_selects_by_mask(run):
    backbone, head = mlp(16, 24, 24).to(run.device), nn.Linear(24, 4).to(run.device)
    batches = vectors(run, 10)
    body = run.parts(backbone, (batches[0][0],))
    optimizer = torch.optim.Adam([*backbone.parameters(), *head.parameters()], lr=1e-2)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        keep = y > 0
        loss = F.cross_entropy(head(body(x)[keep]), y[keep])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, backbone.state_dict(), head


@program
def batches_of_different_sizes_with_a_ladder(run):
    model = mlp(16, 24, 4).to(run.device)
    net = run.parts(model, (torch.randn(8, 16, device=run.device),), ladder=[2, 4, 8])
    batches = [b for rows in (8, 3, 5, 8, 1, 2, 7, 4) for b in vectors(run, 1, rows=rows, seed=rows)]
    return loop(net, torch.optim.SGD(model.parameters(), lr=0.1), batches), model.state_dict()


@program
def last_smaller_batch_of_every_epoch(run):
    model = mlp(16, 24, 4).to(run.device)
    data = torch.utils.data.TensorDataset(*(torch.cat(t).cpu() for t in zip(*vectors(run, 5), strict=True)))
    loader = torch.utils.data.DataLoader(data, batch_size=16)
    net = run.parts(model, (torch.randn(16, 16, device=run.device),))
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for _ in range(3):
        losses += loop(net, optimizer, [(x.to(run.device), y.to(run.device)) for x, y in loader])
    return losses, model.state_dict()


@program
def blocks_of_a_transformer(run):
    model = GPT().to(run.device)
    batches = tokens(run, [12] * 8)
    sample = torch.randn(4, 12, 32, device=run.device, requires_grad=True)
    blocks = run.parts(tuple(model.blocks), ((sample,), (sample.detach().clone().requires_grad_(),)))

    def forward(ids):
        x = model.embed(ids) + model.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in blocks:
            x = block(x)
        return model.head(model.norm(x))

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return loop(forward, optimizer, batches, lm_loss, clip=1.0), model.state_dict()


@program
def mixture_of_experts_between_attention_parts(run):
    """Experts are called with as many tokens as were routed to them."""
    before, after = mlp(16, 24, 16).to(run.device), mlp(16, 24, 4).to(run.device)
    router = nn.Linear(16, 3).to(run.device)
    experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3)).to(run.device)
    batches = vectors(run, 8)
    sample = torch.randn(8, 16, device=run.device, requires_grad=True)
    a, b = run.parts((before, after), ((batches[0][0],), (sample,)))
    optimizer = torch.optim.SGD(
        [p for m in (before, after, router, experts) for p in m.parameters()], lr=0.05
    )
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        h = a(x)
        weight, chosen = router(h).softmax(-1).max(-1)
        out = torch.zeros_like(h)
        for i, expert in enumerate(experts):
            rows = (chosen == i).nonzero().squeeze(-1)
            out = out.index_add(0, rows, weight[rows, None] * expert(h[rows]))
        loss = F.cross_entropy(b(h + out), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [m.state_dict() for m in (before, after, router, experts)]


@program
def gradient_accumulation_over_a_part(run):
    model, batches = mlp(16, 24, 4).to(run.device), vectors(run, 12)
    net = run.parts(model, (batches[0][0],))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for i, (x, y) in enumerate(batches):
        loss = F.cross_entropy(net(x), y) / 4
        loss.backward()
        losses.append(4 * loss.item())
        if (i + 1) % 4 == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=i % 8 == 3)
    return losses, model.state_dict(), optimizer


@program
def two_microbatches_forward_before_their_backwards(run):
    """One forward, one backward: out of order, each part has one memory for what backward needs."""
    model, batches = mlp(16, 24, 4).to(run.device), vectors(run, 8)
    net = run.parts(model, (batches[0][0],))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for (a, ya), (b, yb) in zip(batches[::2], batches[1::2], strict=True):
        optimizer.zero_grad()
        first, second = F.cross_entropy(net(a), ya), F.cross_entropy(net(b), yb)
        (first + second).backward()
        optimizer.step()
        losses += [first.item(), second.item()]
    return losses, model.state_dict()


@program
def pipeline_stages_with_a_copy_for_each_microbatch(run):
    stages = [mlp(16, 24, 16).to(run.device), mlp(16, 24, 4).to(run.device)]
    batches = vectors(run, 8)
    optimizer = torch.optim.SGD([p for s in stages for p in s.parameters()], lr=0.05)
    x0 = batches[0][0]
    h0 = torch.randn(8, 16, device=run.device, requires_grad=True)
    made = run.parts(
        (stages[0].forward, stages[1].forward) if not run.graphs else tuple(stages), ((x0,), (h0,))
    )
    losses = []
    for i in range(0, 8, 2):
        optimizer.zero_grad()
        for x, y in batches[i : i + 2]:
            loss = F.cross_entropy(made[1](made[0](x)), y) / 2
            loss.backward()
            losses.append(2 * loss.item())
        optimizer.step()
    return losses, [s.state_dict() for s in stages]


@program
def siamese_encoder_called_twice(run):
    encoder, batches = mlp(16, 24, 8).to(run.device), vectors(run, 8)
    net = run.parts(encoder, (batches[0][0],))
    optimizer, losses = torch.optim.Adam(encoder.parameters(), lr=1e-2), []
    for x, _ in batches:
        optimizer.zero_grad()
        a, b = net(x), net(x + 0.1)
        loss = 1 - F.cosine_similarity(a, b).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, encoder.state_dict()


@program
def siamese_encoder_called_once_on_both_views(run):
    encoder, batches = mlp(16, 24, 8).to(run.device), vectors(run, 8)
    net = run.parts(encoder, (torch.cat([batches[0][0]] * 2),))
    optimizer, losses = torch.optim.Adam(encoder.parameters(), lr=1e-2), []
    for x, _ in batches:
        optimizer.zero_grad()
        a, b = net(torch.cat([x, x + 0.1])).chunk(2)
        loss = F.mse_loss(a, b.detach()) - 0.01 * a.var(0).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, encoder.state_dict()


@program
def generator_and_discriminator(run):
    g_net, d_net = mlp(4, 16, 16).to(run.device), mlp(16, 16, 1).to(run.device)
    z0 = torch.randn(8, 4, device=run.device)
    x0 = torch.randn(8, 16, device=run.device, requires_grad=True)
    generator = run.parts(g_net, (z0,))
    discriminator = run.parts(d_net, (x0,))
    g_opt, d_opt = (torch.optim.Adam(m.parameters(), lr=1e-3, betas=(0.5, 0.999)) for m in (g_net, d_net))
    losses, real, fake = [], torch.ones(8, 1, device=run.device), torch.zeros(8, 1, device=run.device)
    bce = F.binary_cross_entropy_with_logits
    for x, _ in vectors(run, 8):
        z = torch.randn(8, 4).to(run.device)
        d_opt.zero_grad()
        (a := bce(discriminator(x), real)).backward()
        (b := bce(discriminator(generator(z).detach()), fake)).backward()
        d_opt.step()
        g_opt.zero_grad()
        (c := bce(discriminator(generator(z)), real)).backward()
        g_opt.step()
        losses.append((a.item(), b.item(), c.item()))
    return losses, g_net.state_dict(), d_net.state_dict()


@program
def features_kept_in_a_list_over_an_epoch(run):
    encoder, head = mlp(16, 24, 8).to(run.device), nn.Linear(8, 4).to(run.device)
    batches = vectors(run, 6)
    net = run.parts(encoder, (batches[0][0],))
    optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1)
    features, losses = [], []
    for x, y in batches:
        optimizer.zero_grad()
        h = net(x)
        loss = F.cross_entropy(head(h), y)
        loss.backward()
        optimizer.step()
        features.append(h.detach())
        losses.append(loss.item())
    return losses, torch.cat(features).mean(0), encoder.state_dict()


@program
def features_cloned_in_a_list_over_an_epoch(run):
    encoder, head = mlp(16, 24, 8).to(run.device), nn.Linear(8, 4).to(run.device)
    batches = vectors(run, 6)
    net = run.parts(encoder, (batches[0][0],))
    optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1)
    features = []
    for x, y in batches:
        optimizer.zero_grad()
        h = net(x)
        F.cross_entropy(head(h), y).backward()
        optimizer.step()
        features.append(h.detach().clone())
    return torch.cat(features), encoder.state_dict()


@program
def a_function_that_is_no_module(run):
    weight = nn.Parameter(torch.randn(16, 4, generator=seeded()).to(run.device))

    def forward(x, w):
        return F.log_softmax(torch.tanh(x) @ w, -1)

    batches = vectors(run, 8)
    f = run.parts(forward, (batches[0][0], weight))
    optimizer = torch.optim.Adam([weight], lr=1e-2)
    return loop(lambda x: f(x, weight), optimizer, batches, F.nll_loss), weight


@program
def a_part_with_several_results_in_a_dictionary(run):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.a, self.b = mlp(16, 24, 24), nn.Linear(24, 4), nn.Linear(24, 1)

        def forward(self, x):
            h = self.body(x)
            return {"logits": self.a(h), "value": self.b(h)}

    model, batches = Net().to(run.device), vectors(run, 8)
    net = run.parts(model, (batches[0][0],))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        out = net(x)
        loss = F.cross_entropy(out["logits"], y) + out["value"].pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@program
def a_part_with_an_unused_result(run):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.a, self.b = mlp(16, 24, 24), nn.Linear(24, 4), nn.Linear(24, 1)

        def forward(self, x):
            h = self.body(x)
            return self.a(h), self.b(h)

    model, batches = Net().to(run.device), vectors(run, 8)
    net = run.parts(model, (batches[0][0],))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return loop(lambda x: net(x)[0], optimizer, batches), model.state_dict()


@program
def a_part_with_keyword_arguments(run):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 24), nn.Linear(24, 4)

        def forward(self, x, *, scale):
            return self.b(F.relu(self.a(x)) * scale)

    model, batches = Net().to(run.device), vectors(run, 8)
    scale = torch.ones(8, 1, device=run.device)
    net = run.parts(model, (batches[0][0],), sample_kwargs={"scale": scale})
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for i, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x, scale=scale / (i + 1)), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@program
def a_part_with_dropout(run):
    model, batches = mlp(16, 32, 32, 4, dropout=0.4).to(run.device), vectors(run, 10)
    net = run.parts(model, (batches[0][0],))
    return loop(net, torch.optim.Adam(model.parameters(), lr=1e-2), batches), model.state_dict()


@program
def a_convolutional_backbone_with_batch_norm(run):
    model, batches = ConvNet().to(run.device), images(run, 8)
    net = run.parts(model, (batches[0][0],))
    return loop(net, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), batches), model.state_dict()


@program
def batch_norm_with_a_ladder(run):
    model = ConvNet().to(run.device)
    net = run.parts(model, (torch.randn(8, 3, 8, 8, device=run.device),), ladder=[4, 8])
    batches = [b for rows in (8, 4, 6, 8) for b in images(run, 1, rows=rows)]
    return loop(net, torch.optim.SGD(model.parameters(), lr=0.05), batches), model.state_dict()


@program
def frozen_encoder_and_trained_head(run):
    encoder, head = mlp(16, 24, 24).to(run.device).requires_grad_(False), nn.Linear(24, 4).to(run.device)
    batches = vectors(run, 8)
    net = run.parts(encoder, (batches[0][0],))
    return loop(lambda x: head(net(x)), torch.optim.Adam(head.parameters(), lr=1e-2), batches), head


@program
def encoder_frozen_after_some_steps(run):
    encoder, head = mlp(16, 24, 24).to(run.device), nn.Linear(24, 4).to(run.device)
    batches = vectors(run, 8)
    net = run.parts(encoder, (batches[0][0],))
    optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()], lr=1e-2)
    losses = loop(lambda x: head(net(x)), optimizer, batches[:4])
    encoder.requires_grad_(False)
    losses += loop(lambda x: head(net(x)), optimizer, batches[4:])
    return losses, encoder.state_dict(), head


@program
def gradients_of_inputs_for_a_penalty_on_features(run):
    encoder, critic = mlp(16, 24, 8).to(run.device), mlp(8, 16, 1).to(run.device)
    batches = vectors(run, 8)
    features = torch.randn(8, 8, device=run.device, requires_grad=True)
    net, score = run.parts((encoder, critic), ((batches[0][0],), (features,)))
    optimizer = torch.optim.Adam([*encoder.parameters(), *critic.parameters()], lr=1e-3)
    losses = []
    for x, _ in batches:
        optimizer.zero_grad()
        h = net(x)
        h.retain_grad()
        loss = score(h).pow(2).mean()
        loss.backward()
        losses.append((loss.item(), h.grad.norm().item()))
        optimizer.step()
    return losses, encoder.state_dict()


@program
def saliency_by_gradients_of_the_input(run):
    model = mlp(16, 24, 4).to(run.device)
    x0 = torch.randn(8, 16, device=run.device, requires_grad=True)
    net = run.parts(model, (x0,))
    maps = []
    for x, y in vectors(run, 5):
        x = x.clone().requires_grad_(True)
        net(x).gather(1, y[:, None]).sum().backward()
        maps.append(x.grad.abs())
    return maps


@program
def projected_gradient_attack_on_a_part(run):
    model, batches = mlp(16, 24, 4).to(run.device), vectors(run, 5)
    net = run.parts(model, (batches[0][0].clone().requires_grad_(True),))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for x, y in batches:
        delta = torch.zeros_like(x, requires_grad=True)
        for _ in range(3):
            (g,) = torch.autograd.grad(F.cross_entropy(net(x + delta), y), delta)
            delta = (delta + 0.05 * g.sign()).clamp(-0.1, 0.1).detach().requires_grad_(True)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x + delta.detach()), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@program
def recurrent_cell_called_once_per_time_step(run):
    """Backward through time needs what every call computed."""
    cell, out = nn.GRUCell(4, 16).to(run.device), nn.Linear(16, 1).to(run.device)
    h0 = torch.zeros(8, 16, device=run.device, requires_grad=True)
    step = run.parts(cell, (torch.randn(8, 4, device=run.device), h0))
    optimizer, losses = torch.optim.Adam([*cell.parameters(), *out.parameters()], lr=1e-2), []
    for x, y in regression(run, 4):
        optimizer.zero_grad()
        h = torch.zeros(8, 16, device=run.device, requires_grad=True)
        for piece in x.split(4, 1):
            h = step(piece, h)
        loss = F.mse_loss(out(h), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, cell.state_dict()


@program
def layers_skipped_by_pythons_random(run):
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()).to(run.device) for _ in range(3)]
    head, batches = nn.Linear(16, 4).to(run.device), vectors(run, 10)
    samples = tuple((torch.randn(8, 16, device=run.device, requires_grad=True),) for _ in layers)
    made = run.parts(tuple(layers), samples)
    optimizer = torch.optim.SGD([p for m in (*layers, head) for p in m.parameters()], lr=0.1)

    def forward(x):
        x = x.clone().requires_grad_(True)
        for layer in made:
            if random.random() < 0.7:
                x = x + layer(x)
        return head(x)

    return loop(forward, optimizer, batches), [m.state_dict() for m in layers]


@program
def with_autocast_around_the_loop(run):
    model, batches = mlp(16, 24, 4).to(run.device), vectors(run, 8)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    with torch.autocast(run.device.type, dtype=torch.bfloat16, cache_enabled=False):
        net = run.parts(model, (batches[0][0],))
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast(run.device.type, dtype=torch.bfloat16, cache_enabled=False):
            loss = F.cross_entropy(net(x).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@program
def with_a_scheduler_scaler_and_clipping_by_value(run):
    model, batches = mlp(16, 24, 4).to(run.device), vectors(run, 10)
    net = run.parts(model, (batches[0][0],))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=11)
    scaler = torch.amp.GradScaler(run.device.type, init_scale=256.0)
    losses, rates = [], []
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        losses.append(loss.item())
        rates.append(optimizer.param_groups[0]["lr"])
    return losses, rates, model.state_dict(), scaler


@program
def lbfgs_with_a_closure_over_a_part(run):
    model, batches = mlp(16, 8, 4, act=nn.Tanh).to(run.device), vectors(run, 3, rows=16)
    net = run.parts(model, (batches[0][0],))
    optimizer, losses = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4), []
    for x, y in batches:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    return losses, model.state_dict()


@program
def checkpoint_saved_and_restored_around_parts(run):
    model, batches = mlp(16, 24, 4).to(run.device), vectors(run, 9)
    net = run.parts(model, (batches[0][0],))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = loop(net, optimizer, batches[:3])
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    losses += loop(net, optimizer, batches[3:6])
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    losses += loop(net, optimizer, batches[6:])
    return losses, model.state_dict(), optimizer


@program
def parameter_hooks_and_module_hooks_around_a_part(run):
    model, batches, calls = mlp(16, 24, 4).to(run.device), vectors(run, 6), []
    model[0].weight.register_hook(lambda g: calls.append(g.norm().item()) or g * 0.5)
    model.register_forward_hook(lambda m, i, o: calls.append(o.mean().item()))
    net = run.parts(model, (batches[0][0],))
    losses = loop(net, torch.optim.SGD(model.parameters(), lr=0.1), batches)
    return losses, calls, model.state_dict()


@program
def an_average_of_weights_beside_a_part(run):
    model, batches = mlp(16, 24, 4).to(run.device), vectors(run, 8)
    average = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda a, p, n: 0.9 * a + 0.1 * p)
    net = run.parts(model, (batches[0][0],))
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for batch in batches:
        losses += loop(net, optimizer, [batch])
        average.update_parameters(model)
    return losses, average.module.state_dict(), model.state_dict()
