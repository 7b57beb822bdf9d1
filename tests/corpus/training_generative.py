"""Autoencoders, adversarial networks, diffusion and flows."""

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F

from corpus.training_models import images, mlp, seeded, vectors
from corpus.training_twice import program


class VAE(nn.Module):
    def __init__(self, width=16, latent=4):
        super().__init__()
        self.encoder, self.decoder = mlp(width, 24, 2 * latent), mlp(latent, 24, width)

    def forward(self, x):
        mean, log_var = self.encoder(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return self.decoder(z), mean, log_var


def kl(mean, log_var):
    return -0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).sum(-1).mean()


@program
def autoencoder_with_noise(run):
    model = mlp(16, 8, 4, 8, 16).to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = run.train_step(model, F.mse_loss, optimizer)
    return [step(x + 0.1 * torch.randn_like(x), x) for x, _ in vectors(run, 12)], model


@program
def sparse_autoencoder_with_unit_norm_decoder(run):
    class SAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode, self.decode = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x):
            codes = F.relu(self.encode(x))
            return self.decode(codes), codes

    def criterion(out, x):
        reconstruction, codes = out
        return F.mse_loss(reconstruction, x) + 1e-3 * codes.abs().sum(-1).mean()

    model = SAE().to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = run.train_step(model, criterion, optimizer)
    losses = []
    for x, _ in vectors(run, 12):
        losses.append(step(x, x))
        with torch.no_grad():
            model.decode.weight.div_(model.decode.weight.norm(dim=0, keepdim=True))
    return losses, model


@program
def vae(run):
    model = VAE().to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = run.train_step(model, lambda out, x: F.mse_loss(out[0], x) + 0.1 * kl(*out[1:]), optimizer)
    losses = [step(x, x) for x, _ in vectors(run, 12)]
    with torch.no_grad():
        samples = model.decoder(torch.randn(3, 4).to(run.device))
    return losses, model, samples


@program
def vae_whose_kl_weight_warms_up_as_a_number(run):
    beta = {"value": 0.0}
    model = VAE().to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = run.train_step(
        model, lambda out, x: F.mse_loss(out[0], x) + beta["value"] * kl(*out[1:]), optimizer
    )
    losses = []
    for i, (x, _) in enumerate(vectors(run, 12)):
        beta["value"] = min(1.0, i / 6)
        losses.append(step(x, x))
    return losses, model


@program
def vae_whose_kl_weight_warms_up_as_a_buffer(run):
    class ELBO(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("beta", torch.zeros(()))

        def forward(self, out, x):
            return F.mse_loss(out[0], x) + self.beta * kl(*out[1:])

    model, criterion = VAE().to(run.device), ELBO().to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = run.train_step(model, criterion, optimizer)
    losses = []
    for i, (x, _) in enumerate(vectors(run, 12)):
        criterion.beta.fill_(min(1.0, i / 6))
        losses.append(step(x, x))
    return losses, model


@program
def vae_with_torch_distributions_and_free_bits(run):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = mlp(16, 24, 8), mlp(4, 24, 16)

        def forward(self, x):
            mean, scale = self.encoder(x).chunk(2, -1)
            q = torch.distributions.Normal(mean, F.softplus(scale) + 1e-3)
            p = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(scale))
            return self.decoder(q.rsample()), torch.distributions.kl_divergence(q, p)

    def criterion(out, x):
        return F.mse_loss(out[0], x) + out[1].mean(0).clamp(min=0.05).sum()

    model = Model().to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = run.train_step(model, criterion, optimizer)
    return [step(x, x) for x, _ in vectors(run, 8)], model


class Quantizer(nn.Module):
    """A codebook that follows its rows by a moving average."""

    def __init__(self, codes=8, width=4):
        super().__init__()
        self.register_buffer("codebook", torch.randn(codes, width))
        self.register_buffer("counts", torch.ones(codes))
        self.register_buffer("sums", self.codebook.clone())

    def forward(self, z):
        index = torch.cdist(z, self.codebook).argmin(-1)
        quantized = self.codebook[index]
        if self.training:
            with torch.no_grad():
                one_hot = F.one_hot(index, len(self.codebook)).float()
                self.counts.mul_(0.9).add_(0.1 * one_hot.sum(0))
                self.sums.mul_(0.9).add_(0.1 * one_hot.T @ z)
                self.codebook.copy_(self.sums / self.counts[:, None].clamp(min=1e-2))
        return z + (quantized - z).detach(), F.mse_loss(z, quantized.detach())


@program
def vq_vae_with_a_moving_average_codebook(run):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.quantizer, self.decoder = mlp(16, 16, 4), Quantizer(), mlp(4, 16, 16)

        def forward(self, x):
            z, commitment = self.quantizer(self.encoder(x))
            return self.decoder(z), commitment

    model = Model().to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = run.train_step(model, lambda out, x: F.mse_loss(out[0], x) + 0.25 * out[1], optimizer)
    return [step(x, x) for x, _ in vectors(run, 10)], model


@program
def gan_with_two_optimizers(run):
    generator, discriminator = mlp(4, 16, 16).to(run.device), mlp(16, 16, 1, act=nn.Tanh).to(run.device)
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))

    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator, self.critic = generator, [discriminator]

        def forward(self, z):
            return self.critic[0](self.generator(z))

    bce = nn.BCEWithLogitsLoss()
    d_step = run.train_step(discriminator, bce, d_optimizer)
    g_step = run.train_step(Chain(), bce, g_optimizer)
    d_losses, g_losses = [], []
    one, zero = torch.ones(8, 1, device=run.device), torch.zeros(8, 1, device=run.device)
    for x, _ in vectors(run, 12):
        z = torch.randn(8, 4).to(run.device)
        with torch.no_grad():
            fake = generator(z)
        d_losses.append(d_step(torch.cat([x, fake]), torch.cat([one, zero])))
        g_losses.append(g_step(z, one))
    return d_losses, g_losses, generator, discriminator.state_dict(), g_optimizer, d_optimizer


@program
def wasserstein_gan_with_gradient_penalty(run):
    generator, critic = mlp(4, 16, 16).to(run.device), mlp(16, 16, 1, act=nn.Tanh).to(run.device)
    c_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))

    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.critic = critic

        def forward(self, real, fake):
            t = torch.rand(len(real), 1, device=real.device)
            mixed = (t * real + (1 - t) * fake).requires_grad_(True)
            (gradient,) = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)
            penalty = (gradient.norm(2, dim=1) - 1).pow(2).mean()
            return self.critic(fake).mean() - self.critic(real).mean() + 10 * penalty

    c_step = run.train_step(Critic(), lambda loss, _: loss, c_optimizer)
    critic_parameters = list(critic.parameters())

    def adversarial(fake, _):
        return -critic(fake).mean()

    g_step = run.train_step(generator, adversarial, g_optimizer)
    losses = []
    for i, (x, y) in enumerate(vectors(run, 12)):
        z = torch.randn(8, 4).to(run.device)
        with torch.no_grad():
            fake = generator(z)
        losses.append(c_step((x, fake), y))
        if i % 3 == 2:
            for p in critic_parameters:
                p.requires_grad_(False)
            losses.append(g_step(z, y))
            for p in critic_parameters:
                p.requires_grad_(True)
    return losses, generator.state_dict(), critic.state_dict()


@program
def hinge_gan_with_spectral_norm_and_moving_average(run):
    sn = nn.utils.parametrizations.spectral_norm
    generator = mlp(4, 16, 16).to(run.device)
    average = copy.deepcopy(generator).requires_grad_(False)
    discriminator = nn.Sequential(sn(nn.Linear(16, 16)), nn.LeakyReLU(0.2), sn(nn.Linear(16, 1))).to(
        run.device
    )
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=4e-3, betas=(0.0, 0.9))
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.9))

    def d_loss(scores, real):
        return torch.where(real > 0, F.relu(1 - scores), F.relu(1 + scores)).mean()

    d_step = run.train_step(discriminator, d_loss, d_optimizer)
    g_step = run.train_step(generator, lambda fake, _: -discriminator(fake).mean(), g_optimizer)
    real = torch.cat([torch.ones(8, 1), torch.zeros(8, 1)]).to(run.device)
    losses = []
    for x, y in vectors(run, 10):
        z = torch.randn(8, 4).to(run.device)
        with torch.no_grad():
            fake = generator(z)
        losses.append(d_step(torch.cat([x, fake]), real))
        losses.append(g_step(z, y))
        with torch.no_grad():
            for a, p in zip(average.parameters(), generator.parameters(), strict=True):
                a.lerp_(p, 0.1)
    return losses, generator, average


class Denoiser(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.time = nn.Embedding(50, 16)
        self.net = mlp(width + 16, 32, width, act=nn.SiLU)

    def forward(self, x, t):
        return self.net(torch.cat([x, self.time(t).flatten(1)], -1))


@program
def ddpm_with_noise_in_the_loop(run):
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 50), 0).to(run.device)
    model = Denoiser().to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = run.train_step(model, F.mse_loss, optimizer, clip_norm=1.0)
    losses = []
    for x, _ in vectors(run, 12):
        t = torch.randint(50, (8, 1)).to(run.device)
        noise = torch.randn(8, 16).to(run.device)
        a = alphas[t]
        losses.append(step((a.sqrt() * x + (1 - a).sqrt() * noise, t), noise))
    return losses, model


@program
def ddpm_with_noise_in_the_model_and_an_average(run):
    class DDPM(nn.Module):
        def __init__(self):
            super().__init__()
            self.denoiser = Denoiser()
            self.register_buffer("alphas", torch.cumprod(1 - torch.linspace(1e-4, 0.02, 50), 0))

        def forward(self, x):
            t = torch.randint(50, (x.shape[0], 1), device=x.device)
            noise = torch.randn_like(x)
            a = self.alphas[t]
            return F.mse_loss(self.denoiser(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)

    model = DDPM().to(run.device)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = run.train_step(model, lambda loss, _: loss, optimizer)
    losses = []
    for x, y in vectors(run, 12):
        losses.append(step(x, y))
        average.update_parameters(model)
    return losses, model, average


@program
def diffusion_with_classifier_free_guidance_and_snr_weights(run):
    class Conditional(nn.Module):
        def __init__(self):
            super().__init__()
            self.label, self.net = nn.Embedding(5, 8), mlp(16 + 8 + 1, 32, 16, act=nn.SiLU)

        def forward(self, x, t, label):
            drop = torch.rand(label.shape, device=x.device) < 0.2
            label = torch.where(drop, 4, label)
            return self.net(torch.cat([x, self.label(label).squeeze(1), t], -1))

    def criterion(prediction, target):
        noise, weight = target
        return (weight * (prediction - noise).pow(2).mean(-1, keepdim=True)).mean()

    model = Conditional().to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = run.train_step(model, criterion, optimizer)
    losses = []
    for x, y in vectors(run, 10):
        t = torch.rand(8, 1).to(run.device)
        noise = torch.randn(8, 16).to(run.device)
        weight = (1 / t.clamp(min=0.1)).clamp(max=5.0)
        losses.append(step((torch.cos(t) * x + torch.sin(t) * noise, t, y[:, None]), (noise, weight)))
    return losses, model


@program
def image_diffusion_with_sinusoidal_times(run):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inp, self.mid, self.out = (
                nn.Conv2d(3, 16, 3, padding=1),
                nn.Conv2d(16, 16, 3, padding=1),
                nn.Conv2d(16, 3, 1),
            )
            self.norm = nn.GroupNorm(4, 16)

        def forward(self, x, t):
            frequencies = torch.exp(-math.log(1000) * torch.arange(8, device=t.device) / 8)
            emb = torch.cat([(t * frequencies).sin(), (t * frequencies).cos()], -1)
            h = F.silu(self.inp(x) + emb[:, :, None, None])
            return self.out(F.silu(self.norm(self.mid(h))))

    model = Net().to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = run.train_step(model, F.mse_loss, optimizer)
    losses = []
    for x, _ in images(run, 8):
        t, noise = torch.rand(4, 1).to(run.device), torch.randn(4, 3, 8, 8).to(run.device)
        mix = t[:, :, None, None]
        losses.append(step(((1 - mix) * x + mix * noise, t), noise - x))
    return losses, model


@program
def flow_matching_from_the_devices_generator(run):
    class Velocity(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(17, 32, 16, act=nn.GELU)

        def forward(self, x1):
            x0, t = torch.randn_like(x1), torch.rand(x1.shape[0], 1, device=x1.device)
            xt = torch.lerp(x0, x1, t)
            return self.net(torch.cat([xt, t], -1)), x1 - x0

    model = Velocity().to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = run.train_step(model, lambda out, _: F.mse_loss(*out), optimizer)
    losses = [step(x, y) for x, y in vectors(run, 10)]
    with torch.no_grad():
        x = torch.randn(4, 16).to(run.device)
        for i in range(5):
            x = x + 0.2 * model.net(torch.cat([x, torch.full((4, 1), i / 5, device=run.device)], -1))
    return losses, model, x


@program
def normalizing_flow(run):
    class Coupling(nn.Module):
        def __init__(self, flip):
            super().__init__()
            self.net, self.flip = mlp(8, 24, 16, act=nn.Tanh), flip

        def forward(self, x):
            a, b = x.chunk(2, -1)
            if self.flip:
                a, b = b, a
            scale, shift = self.net(a).chunk(2, -1)
            scale = scale.tanh()
            return torch.cat([a, b * scale.exp() + shift], -1), scale.sum(-1)

    class Flow(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Coupling(i % 2 == 1) for i in range(4))

        def forward(self, x):
            total = 0.0
            for layer in self.layers:
                x, log_det = layer(x)
                total = total + log_det
            prior = -0.5 * (x.pow(2) + math.log(2 * math.pi)).sum(-1)
            return prior + total

    model = Flow().to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    step = run.train_step(model, lambda log_p, _: -log_p.mean(), optimizer)
    return [step(x, y) for x, y in vectors(run, 10)], model


@program
def energy_based_model_with_langevin_samples(run):
    energy = mlp(16, 24, 1, act=nn.SiLU).to(run.device)
    optimizer = torch.optim.Adam(energy.parameters(), lr=1e-3)

    def contrastive(values, _):
        real, fake = values.chunk(2)
        return real.mean() - fake.mean() + 0.1 * (real.pow(2) + fake.pow(2)).mean()

    step = run.train_step(energy, contrastive, optimizer)
    losses = []
    for x, y in vectors(run, 8):
        sample = torch.randn(8, 16).to(run.device)
        for _ in range(3):
            sample.requires_grad_(True)
            (gradient,) = torch.autograd.grad(energy(sample).sum(), sample)
            sample = (sample - 0.1 * gradient + 0.05 * torch.randn(8, 16).to(run.device)).detach()
        losses.append(step(torch.cat([x, sample]), torch.cat([y, y])))
    return losses, energy


@program
def style_transfer_that_optimises_an_image(run):
    features = nn.Conv2d(3, 8, 3, padding=1).to(run.device).requires_grad_(False)

    class Canvas(nn.Module):
        def __init__(self, start):
            super().__init__()
            self.image = nn.Parameter(start.clone())

        def forward(self, _):
            return features(self.image.clamp(-2, 2))

    def gram(f):
        f = f.flatten(2)
        return f @ f.transpose(1, 2) / f.shape[-1]

    (style, _), (content, _) = images(run, 2, rows=1)
    wanted = gram(features(style))
    canvas = Canvas(content)
    optimizer = torch.optim.Adam(canvas.parameters(), lr=0.05)
    step = run.train_step(canvas, lambda f, t: F.mse_loss(f, t) + 10 * F.mse_loss(gram(f), wanted), optimizer)
    target = features(content).detach()
    return [step(content, target) for _ in range(12)], canvas


@program
def neural_field_with_random_pixels(run):
    g = seeded()
    picture = torch.rand(16, 16, 3, generator=g).to(run.device)
    frequencies = torch.randn(2, 16, generator=g).to(run.device)

    class Field(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(32, 32, 3)

        def forward(self, xy):
            phase = 2 * math.pi * xy @ frequencies
            return self.net(torch.cat([phase.sin(), phase.cos()], -1)).sigmoid()

    model = Field().to(run.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    step = run.train_step(model, F.mse_loss, optimizer)
    psnr = []
    for _ in range(12):
        row, column = torch.randint(16, (2, 32), generator=g).to(run.device)
        loss = step(torch.stack([row, column], -1) / 16, picture[row, column])
        scheduler.step()
        psnr.append(-10 * math.log10(loss.item()))
    return psnr, model
