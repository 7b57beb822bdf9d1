"""Images: networks, detection, post-processing, augmentation."""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from corpus.registry import World, program


class BasicBlock(nn.Module):
    def __init__(self, inside, outside, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.downsample = None
        if stride != 1 or inside != outside:
            self.downsample = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x):
        identity = x
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return F.relu(out, inplace=True)


class ResNet(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.layers = nn.ModuleList([BasicBlock(8, 8), BasicBlock(8, 16, 2)])
        self.fc = nn.Linear(16, classes)

    def features(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return torch.flatten(F.adaptive_avg_pool2d(x, 1), 1)

    def forward(self, x):
        return self.fc(self.features(x))


class PatchEmbed(nn.Module):
    def __init__(self, size=16, patch=4, dim=16):
        super().__init__()
        self.num_patches = (size // patch) ** 2
        self.proj = nn.Conv2d(3, dim, patch, patch)

    def forward(self, x):
        return self.proj(x).flatten(2).transpose(1, 2)


class ViT(nn.Module):
    def __init__(self, dim=16, depth=2, classes=4):
        super().__init__()
        self.patch_embed = PatchEmbed(dim=dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, self.patch_embed.num_patches + 1, dim) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, 4, 32, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        B = x.shape[0]
        x = self.patch_embed(x)
        x = torch.cat((self.cls_token.expand(B, -1, -1), x), dim=1) + self.pos_embed
        return self.head(self.encoder(x)[:, 0])


@program("resnet in eval mode", tags=["vision"])
def resnet(world: World):
    model = ResNet().to(world.device).eval()
    f = world.graphed(model, ladder=[1, 2, 4, 8])
    with torch.no_grad():
        for n in (8, 3, 1, 5):
            yield f(world.randn(n, 3, 8, 8))
    world.diagnose(f, world.randn(2, 3, 8, 8))


@program("resnet features through a method", tags=["vision", "modules"])
def resnet_features(world: World):
    model = ResNet().to(world.device).eval()
    f = world.graphed(model, ladder=[1, 4])
    with torch.no_grad():
        x = world.randn(3, 3, 8, 8)
        yield f(x).softmax(-1)
        yield f.features(x)
        f.fc.weight.mul_(2)
        yield f(x).softmax(-1)
    world.diagnose(f, x)


@program("resnet left in training mode", tags=["vision", "training-mode"])
def resnet_training_mode(world: World):
    model = ResNet().to(world.device)
    f = world.graphed(model, ladder=[2, 4])
    with torch.no_grad():
        for n in (4, 3, 2):
            yield f(world.randn(n, 3, 8, 8))
    world.diagnose(f, world.randn(3, 3, 8, 8))


@program("resnet, channels last", tags=["vision", "strides"])
def channels_last(world: World):
    model = ResNet().to(world.device).eval().to(memory_format=torch.channels_last)
    f = world.graphed(model, ladder=[1, 4])
    with torch.inference_mode():
        for n in (4, 2, 1):
            yield f(world.randn(n, 3, 8, 8).to(memory_format=torch.channels_last))
        yield f(world.randn(3, 3, 8, 8))
    world.diagnose(f, world.randn(2, 3, 8, 8))


@program("images of several resolutions", tags=["vision", "signatures"])
def resolutions(world: World):
    f = world.graphed(ResNet().to(world.device).eval(), ladder=[1, 2, 4])
    with torch.no_grad():
        for side in (8, 12, 8, 16):
            for n in (3, 1):
                yield f(world.randn(n, 3, side, side))
    world.diagnose(f, world.randn(2, 3, 8, 8))


@program("vit with a class token", tags=["vision", "attention"])
def vit(world: World):
    f = world.graphed(ViT().to(world.device).eval(), ladder=[1, 2, 4, 8])
    with torch.no_grad():
        for n in (5, 2, 8, 1):
            yield f(world.randn(n, 3, 16, 16))
    world.diagnose(f, world.randn(3, 3, 16, 16))


@program("vit that returns its attention maps", tags=["vision", "attention"])
def vit_attention(world: World):
    class Attention(nn.Module):
        def __init__(self, dim=16, heads=4):
            super().__init__()
            self.heads, self.scale = heads, (dim // heads) ** -0.5
            self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
            self.last_map = None

        def forward(self, x):
            B, N, C = x.shape
            qkv = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
            q, k, v = qkv.unbind(0)
            attn = (q @ k.transpose(-2, -1)) * self.scale
            attn = attn.softmax(dim=-1)
            self.last_map = attn
            return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))

    model = nn.Sequential(PatchEmbed(), Attention(), nn.LayerNorm(16)).to(world.device).eval()
    f = world.graphed(model, ladder=[1, 4])
    with torch.no_grad():
        for n in (4, 3, 1):
            yield f(world.randn(n, 3, 16, 16)).mean(1)
            yield model[1].last_map
    world.diagnose(f, world.randn(3, 3, 16, 16))


@program("unet with skip connections", tags=["vision"])
def unet(world: World):
    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down = nn.ModuleList([nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)])
            self.up = nn.ModuleList([nn.ConvTranspose2d(8, 4, 2, 2), nn.ConvTranspose2d(8, 4, 2, 2)])
            self.norm = nn.GroupNorm(2, 8)
            self.out = nn.Conv2d(8, 2, 1)

        def forward(self, x):
            skips = []
            for conv in self.down:
                x = F.silu(conv(x))
                skips.append(x)
                x = F.max_pool2d(x, 2)
            x = self.norm(x)
            for up in self.up:
                x = up(x)
                skip = skips.pop()
                x = torch.cat([x, skip[:, :4]], 1)
            return self.out(x)

    f = world.graphed(UNet().to(world.device).eval(), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (1, 3, 4):
            mask = f(world.randn(n, 3, 16, 16)).argmax(1)
            yield mask
    world.diagnose(f, world.randn(3, 3, 16, 16))


@program("detection head: boxes, scores and classes in a dictionary", tags=["vision", "structures"])
def detection(world: World):
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.cls, self.box = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(3, 8, 3, padding=1)

        def forward(self, images):
            B, _, H, W = images.shape
            scores = self.cls(images).permute(0, 2, 3, 1).reshape(B, -1, 3).sigmoid()
            deltas = self.box(images).permute(0, 2, 3, 1).reshape(B, -1, 4)
            ys, xs = torch.meshgrid(torch.arange(H), torch.arange(W), indexing="ij")
            centres = torch.stack([xs, ys, xs, ys], -1).reshape(-1, 4).repeat_interleave(2, 0)
            boxes = centres.to(deltas) + deltas
            best, labels = scores.max(-1)
            top = best.topk(5, dim=1)
            return {
                "scores": top.values,
                "labels": labels.gather(1, top.indices),
                "boxes": boxes.gather(1, top.indices[..., None].expand(-1, -1, 4)),
            }

    f = world.graphed(Head().to(world.device).eval(), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (2, 3, 1):
            yield f(world.randn(n, 3, 6, 6))
    world.diagnose(f, world.randn(3, 3, 6, 6))


@program("non-maximum suppression after the network", tags=["vision", "host-values"])
def suppression(world: World):
    net = nn.Linear(6, 5).to(world.device)

    def iou(a, b):
        lt, rb = torch.max(a[:, None, :2], b[:, :2]), torch.min(a[:, None, 2:], b[:, 2:])
        inter = (rb - lt).clamp(min=0).prod(2)
        area = [(t[:, 2:] - t[:, :2]).prod(1) for t in (a, b)]
        return inter / (area[0][:, None] + area[1] - inter)

    def detect(x):
        out = net(x)
        corner = out[:, :2]
        boxes, scores = torch.cat([corner, corner + out[:, 2:4].exp()], 1), out[:, 4]
        order = scores.argsort(descending=True)
        boxes, keep = boxes[order], []
        suppressed = torch.zeros(len(boxes), dtype=torch.bool, device=x.device)
        overlaps = iou(boxes, boxes) > 0.3
        for i in range(len(boxes)):
            if not suppressed[i]:
                keep.append(i)
                suppressed |= overlaps[i]
        return order[torch.tensor(keep, device=x.device)]

    f = world.graphed(detect, ladder=[4, 8])
    with torch.no_grad():
        for n in (8, 6, 4):
            yield f(world.randn(n, 6))
    world.diagnose(f, world.randn(6, 6))


@program("boxes filtered by a threshold outside of the graph", tags=["vision", "results-kept"])
def threshold_outside(world: World):
    f = world.graphed(
        nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5)).to(world.device), ladder=[2, 4]
    )
    everything = []
    with torch.no_grad():
        for n in (4, 3, 2, 4):
            out = f(world.randn(n, 6))
            good = out[:, 4] > 0
            everything.append(out[good, :4])
    yield torch.cat(everything)
    world.diagnose(f, world.randn(3, 6))


@program("random crop and flip of a batch", tags=["vision", "random"])
def augmentation(world: World):
    def augment(images):
        flip = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
        images = torch.where(flip, images.flip(-1), images)
        return images * (0.8 + 0.4 * torch.rand(len(images), 1, 1, 1, device=images.device))

    f = world.graphed(augment, ladder=[2, 4])
    for n in (4, 2):
        torch.manual_seed(n)
        once = f(world.rand(n, 3, 4, 4))
        yield once.shape, bool((once >= 0).all())
    images = world.rand(4, 3, 4, 4)
    torch.manual_seed(7)
    first = f(images).clone()
    torch.manual_seed(7)
    yield torch.equal(first, f(images))
    yield torch.equal(first, f(images))
    world.diagnose(f, world.rand(3, 3, 4, 4))


@program("normalisation of uint8 images", tags=["vision", "integers"])
def normalise(world: World):
    mean = torch.tensor([0.485, 0.456, 0.406], device=world.device).view(1, 3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225], device=world.device).view(1, 3, 1, 1)

    def preprocess(images):
        x = images.permute(0, 3, 1, 2).float().div_(255)
        x = F.interpolate(x, size=(8, 8), mode="bilinear", align_corners=False)
        return x.sub_(mean).div_(std)

    f = world.graphed(preprocess, ladder=[1, 2, 4])
    for n in (3, 1, 4):
        yield f(world.randint(256, n, 6, 5, 3, dtype=torch.uint8))
    world.diagnose(f, world.randint(256, 3, 6, 5, 3, dtype=torch.uint8))


@program("in-place normalisation of the caller's images", tags=["vision", "arguments-changed"])
def normalise_in_place(world: World):
    def preprocess(images):
        images.sub_(0.5).div_(0.5)
        return images.mean((1, 2, 3))

    f = world.graphed(preprocess, ladder=[1, 2, 4])
    for n in (3, 4, 1):
        images = world.rand(n, 3, 4, 4)
        yield f(images)
        yield images
    world.diagnose(f, world.rand(2, 3, 4, 4))


@program("mixup within the batch", tags=["vision", "batch-dependent"])
def mixup(world: World):
    def mix(images, weights):
        return weights * images + (1 - weights) * images.roll(1, 0)

    f = world.graphed(mix, ladder=[2, 4, 8])
    for n in (4, 3, 8):
        yield f(world.rand(n, 3, 2, 2), world.rand(n, 1, 1, 1))
    world.diagnose(f, world.rand(3, 3, 2, 2), world.rand(3, 1, 1, 1))


@program("grid sample with an affine transform", tags=["vision"])
def spatial_transformer(world: World):
    class STN(nn.Module):
        def __init__(self):
            super().__init__()
            self.loc = nn.Linear(48, 6)
            nn.init.normal_(self.loc.weight, std=0.01)
            self.loc.bias.data = torch.tensor([1.0, 0, 0, 0, 1, 0])

        def forward(self, x):
            theta = self.loc(x.flatten(1)).view(-1, 2, 3)
            grid = F.affine_grid(theta, x.size(), align_corners=False)
            return F.grid_sample(x, grid, align_corners=False)

    f = world.graphed(STN().to(world.device).eval(), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (2, 3, 1):
            yield f(world.randn(n, 3, 4, 4))
    world.diagnose(f, world.randn(3, 3, 4, 4))


@program("siamese network with two images", tags=["vision"])
def siamese(world: World):
    net = (
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8)).to(world.device).eval()
    )

    def similarity(left, right):
        return F.cosine_similarity(net(left), net(right))

    f = world.graphed(similarity, ladder=[1, 4, 8])
    with torch.no_grad():
        for n in (7, 1, 4):
            yield f(world.randn(n, 1, 8, 8), world.randn(n, 1, 8, 8))
        same = world.randn(3, 1, 8, 8)
        yield f(same, same)
    world.diagnose(f, world.randn(3, 1, 8, 8), world.randn(3, 1, 8, 8))


@program("squeeze and excitation, depthwise convolution, hard-swish", tags=["vision"])
def mobilenet(world: World):
    class Block(nn.Module):
        def __init__(self, c=8):
            super().__init__()
            self.dw = nn.Conv2d(c, c, 3, padding=1, groups=c)
            self.se = nn.Sequential(
                nn.AdaptiveAvgPool2d(1), nn.Conv2d(c, 2, 1), nn.ReLU(), nn.Conv2d(2, c, 1)
            )
            self.act = nn.Hardswish(inplace=True)

        def forward(self, x):
            y = self.dw(x)
            return self.act(y * self.se(y).sigmoid()) + x

    f = world.graphed(nn.Sequential(Block(), Block()).to(world.device).eval(), ladder=[1, 2, 4])
    with torch.inference_mode():
        for n in (3, 4, 1):
            yield f(world.randn(n, 8, 5, 5))
    world.diagnose(f, world.randn(3, 8, 5, 5))


@program("instance norm and reflect padding, style transfer", tags=["vision"])
def style(world: World):
    model = nn.Sequential(
        nn.ReflectionPad2d(2), nn.Conv2d(3, 4, 5), nn.InstanceNorm2d(4, affine=True), nn.ReLU(),
        nn.Upsample(scale_factor=2), nn.Conv2d(4, 3, 1), nn.Tanh(),
    ).to(world.device)  # fmt: skip
    f = world.graphed(model, ladder=[1, 2])
    with torch.no_grad():
        for n in (1, 2, 1):
            yield (f(world.randn(n, 3, 6, 6)) * 127.5 + 127.5).clamp(0, 255).to(torch.uint8).float() // 16
    world.diagnose(f, world.randn(2, 3, 6, 6))


@program("vae: encode, reparametrise with noise given, decode", tags=["vision", "structures"])
def vae(world: World):
    @dataclass
    class Output:
        sample: torch.Tensor
        mean: torch.Tensor
        kl: torch.Tensor

    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc, self.dec = nn.Linear(16, 8), nn.Linear(4, 16)

        def forward(self, x, noise):
            mean, logvar = self.enc(x.flatten(1)).chunk(2, -1)
            z = mean + noise * torch.exp(0.5 * logvar)
            kl = 0.5 * (mean**2 + logvar.exp() - 1 - logvar).sum(-1)
            return Output(self.dec(z).sigmoid().view_as(x), mean, kl)

    f = world.graphed(VAE().to(world.device), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (3, 2):
            out = f(world.randn(n, 4, 4), world.randn(n, 4))
            yield out.sample, out.mean, out.kl
            yield type(out).__name__
    world.diagnose(f, world.randn(3, 4, 4), world.randn(3, 4))


@program("test-time augmentation: a loop over views of the batch", tags=["vision"])
def test_time_augmentation(world: World):
    net = ResNet().to(world.device).eval()

    @torch.no_grad()
    def predict(x):
        views = [x, x.flip(-1), x.flip(-2), x.rot90(1, (-2, -1))]
        return torch.stack([net(v).softmax(-1) for v in views]).mean(0)

    f = world.graphed(predict, ladder=[1, 2, 4])
    for n in (2, 4, 3):
        yield f(world.randn(n, 3, 8, 8))
    world.diagnose(f, world.randn(3, 3, 8, 8))


@program("multi-scale features as a list and a tuple with None", tags=["vision", "structures"])
def feature_pyramid(world: World):
    class FPN(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, stride=s, padding=1) for s in (1, 2, 2))

        def forward(self, x, with_last=True):
            features = []
            for conv in self.convs:
                x = conv(x).relu()
                features.append(x)
            return features, (x.mean((2, 3)) if with_last else None)

    f = world.graphed(FPN().to(world.device), ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (1, 3):
            yield f(world.randn(n, 4, 8, 8))
            yield f(world.randn(n, 4, 8, 8), with_last=False)
    world.diagnose(f, world.randn(3, 4, 8, 8))


@program("position embeddings resized and cached by resolution", tags=["vision", "python-state"])
def resized_positions(world: World):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.pos = nn.Parameter(torch.randn(1, 4, 4, 4))
            self.cache = {}

        def positions(self, size):
            if size not in self.cache:
                self.cache[size] = F.interpolate(self.pos, size=size, mode="bicubic", align_corners=False)
            return self.cache[size]

        def forward(self, x):
            return (x + self.positions(tuple(x.shape[-2:]))).mean(1)

    f = world.graphed(Model().to(world.device).eval(), ladder=[1, 2, 4])
    with torch.no_grad():
        for side in (4, 6, 4):
            yield f(world.randn(3, 4, side, side))
            yield f(world.randn(1, 4, side, side))
    world.diagnose(f, world.randn(2, 4, 4, 4))


@program("soft-argmax of heat maps, keypoints as pixels", tags=["vision"])
def keypoints(world: World):
    def decode(heat):
        H, W = heat.shape[2:]
        p = heat.flatten(2).softmax(-1)
        xs = torch.linspace(0, 1, W, device=heat.device).repeat(H)
        ys = torch.linspace(0, 1, H, device=heat.device).repeat_interleave(W)
        soft = torch.stack([(p * xs).sum(-1), (p * ys).sum(-1)], -1)
        hard = heat.flatten(2).argmax(-1)
        return soft, torch.stack([hard % W, hard // W], -1)

    f = world.graphed(decode, ladder=[1, 2, 4])
    for n in (2, 4, 3):
        yield f(world.randn(n, 3, 5, 6))
    world.diagnose(f, world.randn(3, 3, 5, 6))


@program("deformable points gathered from a feature map", tags=["vision"])
def gathered_points(world: World):
    proj = nn.Linear(4, 8).to(world.device)

    def sample(features, reference):
        offsets = proj(reference).view(*reference.shape[:2], 2, 2, 2).sum(2)
        grid = (reference.unflatten(-1, (2, 2)) + 0.1 * offsets).clamp(-1, 1)
        return F.grid_sample(features, grid, padding_mode="border", align_corners=True)

    f = world.graphed(sample, ladder=[1, 2, 4])
    with torch.no_grad():
        for n in (1, 3):
            yield f(world.randn(n, 3, 5, 5), world.rand(n, 6, 4))
    world.diagnose(f, world.randn(2, 3, 5, 5), world.rand(2, 6, 4))


@program("sinusoidal position table built in forward", tags=["vision"])
def sinusoids(world: World):
    def embed(x):
        dim = x.shape[-1]
        half = torch.arange(dim // 2, device=x.device) * (-math.log(10000) / (dim // 2))
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * half.exp()
        return x + torch.cat([angles.sin(), angles.cos()], -1)

    f = world.graphed(embed, ladder=[1, 2, 4])
    for n in (4, 3):
        yield f(world.randn(n, 5, 8))
        yield f(world.randn(n, 7, 8))
    world.diagnose(f, world.randn(2, 5, 8))


@program("image folder loop: last batch is smaller", tags=["vision", "results-kept"])
def image_folder(world: World):
    f = world.graphed(ResNet().to(world.device).eval(), ladder=[4])
    data = torch.utils.data.TensorDataset(world.randn(10, 3, 8, 8), world.randint(5, 10))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    logits, targets = [], []
    with torch.no_grad():
        for images, labels in loader:
            logits.append(f(images))
            targets.append(labels)
    logits, targets = torch.cat(logits), torch.cat(targets)
    yield logits, F.cross_entropy(logits, targets).item()
    yield (logits.topk(2).indices == targets[:, None]).any(1).float().mean().item()
    world.diagnose(f, world.randn(3, 3, 8, 8))
