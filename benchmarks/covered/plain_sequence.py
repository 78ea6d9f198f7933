"""Plain modules over sequences: attention, recurrent nets and state spaces."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from covered.plain_unusual import Make, Parts, Residual, mlp, parameter
from torch import Tensor, nn, randint, randn


class RMSNorm(nn.Module):
    """Root-mean-square normalization by hand."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding of (batch, heads, sequence, size), by halves."""
    half = x.shape[-1] // 2
    frequency = 10000 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device).unsqueeze(1) * frequency
    left, right = x.chunk(2, -1)
    return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], -1)


class SelfAttention(nn.Module):
    """Attention by one projection of queries, keys and values; causal if asked."""

    def __init__(self, size: int = 64, heads: int = 4, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, size = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, size // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, length, size))


def block(size: int = 64, causal: bool = False) -> nn.Module:
    """A pre-norm transformer layer."""
    feed_forward = mlp(size, 4 * size, size, activation=nn.GELU)
    attention = Residual(nn.LayerNorm(size), SelfAttention(size, causal=causal))
    return nn.Sequential(attention, Residual(nn.LayerNorm(size), feed_forward))


class GroupedAttention(nn.Module):
    """Four query heads over two key-value heads, rotary, causal, with a SwiGLU after it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = RMSNorm(64), RMSNorm(64)
        self.q, self.out = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.k, self.v = nn.Linear(64, 32, bias=False), nn.Linear(64, 32, bias=False)
        self.gate, self.up, self.down = nn.Linear(64, 160), nn.Linear(64, 160), nn.Linear(160, 64)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h = self.norm(x)
        q = rotate(self.q(h).view(batch, length, 4, 16).transpose(1, 2))
        k = rotate(self.k(h).view(batch, length, 2, 16).transpose(1, 2)).repeat_interleave(2, dim=1)
        v = self.v(h).view(batch, length, 2, 16).transpose(1, 2).repeat_interleave(2, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().view(batch, length, 64))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class AlibiAttention(Parts):
    """Attention of weights by head, all by einsum, with a slope of distance a head."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = torch.einsum("bsd,cdhe->cbhse", x, self.qkv).unbind(0)
        place = torch.arange(x.shape[1], device=x.device)
        distance = (place[None, :] - place[:, None]).clamp(max=0)
        slopes = 2.0 ** -torch.arange(1, 5, device=x.device)
        scores = torch.einsum("bhqe,bhke->bhqk", q, k) / 4 + slopes.view(4, 1, 1) * distance
        scores = scores.masked_fill(place[None, :] > place[:, None], float("-inf"))
        return torch.einsum("bhqe,hed->bqd", torch.einsum("bhqk,bhke->bhqe", scores.softmax(-1), v), self.out)


class MultiheadLayer(Parts):
    """A post-norm layer around torch's multi-head attention, with a padding mask."""

    def forward(self, x: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        y, weights = self.attention(x, x, x, key_padding_mask=padding)
        x = self.norm(x + y)
        return self.norm2(x + self.net(x)), weights


class Translator(Parts):
    """torch's own transformer between embeddings and a loss."""

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1] - 1, device=target.device)
        hidden = self.net(self.embed(source), self.embed(target[:, :-1]), tgt_mask=mask)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), target[:, 1:].flatten())


class Perceiver(Parts):
    """Learned latents that attend to a long input, and to themselves."""

    def forward(self, x: Tensor) -> Tensor:
        latents = self.latents.expand(x.shape[0], -1, -1)
        q = self.q(latents).unflatten(-1, (4, 16)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 4, 16)).permute(2, 0, 3, 1, 4).unbind(0)
        latents = latents + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(self.body(latents).mean(1))


class LinearAttention(Parts):
    """Causal linear attention, as running sums of outer products."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = F.elu(q.unflatten(-1, (4, 16))) + 1, F.elu(k.unflatten(-1, (4, 16))) + 1, v.unflatten(-1, (4, 16))
        state = torch.einsum("bshk,bshv->bshkv", k, v).cumsum(1)
        norm = torch.einsum("bshk,bshk->bsh", q, k.cumsum(1)).unsqueeze(-1)
        return self.out((torch.einsum("bshk,bshkv->bshv", q, state) / (norm + 1e-6)).flatten(2))


class SlidingWindow(Parts):
    """Attention to the eight tokens before, by a mask."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.qkv(x).split(64, -1))
        place = torch.arange(x.shape[1], device=x.device)
        ahead = place[:, None] - place[None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=(ahead >= 0) & (ahead < 8))
        return self.out(y.transpose(1, 2).flatten(2))


class SmallGPT(nn.Module):
    """A decoder with learned positions and an output tied to its embedding; it gives logits and a loss."""

    def __init__(self, vocabulary: int = 257, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, 64), nn.Embedding(64, 64)
        self.blocks = nn.ModuleList(block(causal=True) for _ in range(layers))
        self.norm, self.head, self.drop = nn.LayerNorm(64), nn.Linear(64, vocabulary, bias=False), nn.Dropout(0.1)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        place = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.tokens(tokens) + self.positions(place))
        for layer in self.blocks:
            x = layer(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class BiasedAttention(nn.Module):
    """Attention with a learned bias by distance (in eight buckets) instead of positions; over a memory if given."""

    def __init__(self, causal: bool = False, cross: bool = False) -> None:
        super().__init__()
        self.causal, self.norm, self.bias = causal, RMSNorm(64), None if cross else nn.Embedding(8, 4)
        self.q, self.k, self.v, self.out = (nn.Linear(64, 64, bias=False) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        h = self.norm(x)
        source = h if memory is None else memory
        q, k, v = self.q(h), self.k(source), self.v(source)
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in (q, k, v))
        scores = q @ k.transpose(-1, -2)
        if memory is None:
            place = torch.arange(x.shape[1], device=x.device)
            distance = place[None, :] - place[:, None]
            scores = scores + self.bias(distance.abs().add(1).float().log2().long().clamp(max=7)).permute(2, 0, 1)
            if self.causal:
                scores = scores.masked_fill(distance > 0, torch.finfo(scores.dtype).min)
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class EncoderDecoder(nn.Module):
    """An encoder and a decoder in the manner of T5."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.scale = nn.Embedding(257, 64), RMSNorm(64), 64**-0.5
        self.encoder = nn.Sequential(BiasedAttention(), Residual(RMSNorm(64), mlp(64, 128, 64)))
        self.own, self.cross = BiasedAttention(causal=True), BiasedAttention(cross=True)
        self.feed_forward = Residual(RMSNorm(64), mlp(64, 128, 64))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.norm(self.encoder(self.embed(source)))
        start = torch.zeros_like(target[:, :1])
        x = self.own(self.embed(torch.cat([start, target[:, :-1]], 1)))
        x = self.feed_forward(self.cross(x, memory))
        logits = F.linear(self.norm(x) * self.scale, self.embed.weight)
        return F.cross_entropy(logits.transpose(1, 2), target)


class FourierMixing(nn.Module):
    """Mixes tokens and features by a Fourier transform."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(torch.fft.fft(x, dim=-1), dim=1).real


class LastState(Parts):
    """Classifies a sequence by the state after its last token."""

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.net(x)
        return self.head(outputs[:, -1])


class Tagger(Parts):
    """Tags each token by a bidirectional LSTM; padding gives no loss."""

    def forward(self, tokens: Tensor, tags: Tensor) -> tuple[Tensor, Tensor]:
        hidden, _ = self.lstm(self.embed(tokens))
        logits = self.head(hidden)
        return F.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=-100), logits


class LanguageModel(Parts):
    """A GRU that predicts the next token from an initial state."""

    def forward(self, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs, state = self.gru(self.embed(tokens), state)
        return self.head(outputs), state


class LSTMOverTime(Parts):
    """An LSTM cell in a loop over time."""

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], 64)
        outputs = []
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            outputs.append(h)
        return self.head(torch.stack(outputs, 1))


class AttendingDecoder(Parts):
    """A GRU cell that decodes with additive attention to an encoder's states."""

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, state = self.encoder(self.embed(source))
        state, losses = state[0], []
        for t in range(target.size(1) - 1):
            weights = self.score(torch.tanh(memory + state.unsqueeze(1))).softmax(1)
            context = (weights * memory).sum(1)
            state = self.cell(torch.cat([self.embed(target[:, t]), context], -1), state)
            losses.append(F.cross_entropy(self.head(state), target[:, t + 1]))
        return torch.stack(losses).mean()


class SelectiveScan(nn.Module):
    """A state space whose step, input and output depend on the token, in a loop; gated, after a causal convolution."""

    def __init__(self, size: int = 128, state: int = 8) -> None:
        super().__init__()
        self.state, self.norm, self.into = state, RMSNorm(64), nn.Linear(64, 2 * size)
        self.conv = nn.Conv1d(size, size, 4, groups=size, padding=3)
        self.select, self.step, self.out = nn.Linear(size, 4 + 2 * state), nn.Linear(4, size), nn.Linear(size, 64)
        self.log_decay = nn.Parameter(torch.arange(1.0, state + 1).log().repeat(size, 1))
        self.skip = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        u, gate = self.into(self.norm(x)).chunk(2, -1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        low, b, c = self.select(u).split([4, self.state, self.state], -1)
        step = F.softplus(self.step(low)).unsqueeze(-1)
        decay, driven = torch.exp(-step * self.log_decay.exp()), step * b.unsqueeze(2) * u.unsqueeze(-1)
        state, outputs = torch.zeros_like(driven[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + driven[:, t]
            outputs.append((state * c[:, t].unsqueeze(1)).sum(-1))
        return x + self.out((torch.stack(outputs, 1) + u * self.skip) * F.silu(gate))


class LongConvolution(Parts):
    """A diagonal state space as one long convolution, by FFT."""

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        decay = -self.log_real.exp() + 1j * self.imaginary
        powers = torch.exp(decay.unsqueeze(-1) * torch.arange(length, device=x.device))
        kernel = 2 * (torch.view_as_complex(self.c).unsqueeze(-1) * powers).sum(1).real
        u = torch.fft.rfft(x.transpose(1, 2), n=2 * length)
        y = torch.fft.irfft(u * torch.fft.rfft(kernel, n=2 * length), n=2 * length)[..., :length]
        return self.out(F.gelu(y.transpose(1, 2) + x * self.skip))


def hidden() -> tuple[Tensor]:
    """The arguments of most calls: sequences of vectors."""
    return (randn(8, 32, 64),)


def tokens(length: int = 16) -> Tensor:
    """Tokens of a vocabulary of 257."""
    return randint(257, (8, length))


def multihead_layer() -> nn.Module:
    """The parts of `MultiheadLayer`."""
    attention = nn.MultiheadAttention(64, 4, dropout=0.1, batch_first=True)
    return MultiheadLayer(attention=attention, norm=nn.LayerNorm(64), norm2=nn.LayerNorm(64), net=mlp(64, 256, 64))


def translator() -> nn.Module:
    """The parts of `Translator`."""
    net = nn.Transformer(64, 4, 1, 1, 128, batch_first=True)
    return Translator(net=net, embed=nn.Embedding(257, 64), head=nn.Linear(64, 257))


def perceiver() -> nn.Module:
    """The parts of `Perceiver`, over an input of 48 numbers."""
    parts = {"q": nn.Linear(64, 64), "kv": nn.Linear(48, 128), "body": block(), "head": nn.Linear(64, 10)}
    return Perceiver(latents=parameter(8, 64), **parts)


def attending_decoder() -> nn.Module:
    """The parts of `AttendingDecoder`."""
    parts = {"encoder": nn.GRU(64, 64, batch_first=True), "cell": nn.GRUCell(128, 64), "score": nn.Linear(64, 1)}
    return AttendingDecoder(embed=nn.Embedding(257, 64), head=nn.Linear(64, 257), **parts)


def long_convolution() -> nn.Module:
    """The parts of `LongConvolution`, with a state of 16."""
    parts = {"log_real": nn.Parameter(torch.full((64, 16), math.log(0.5))), "c": parameter(64, 16, 2)}
    imaginary = nn.Parameter(math.pi * torch.arange(16.0).repeat(64, 1))
    return LongConvolution(**parts, imaginary=imaginary, skip=parameter(64), out=nn.Linear(64, 64))


def encoder_decoder_layers() -> tuple[nn.Module, nn.Module]:
    """torch's encoder and decoder of two layers each; the decoder is sequence first."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, norm_first=True, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return encoder, nn.TransformerDecoder(nn.TransformerDecoderLayer(64, 4, 128, activation="gelu"), 2)


def attention(kind: type[Parts]) -> nn.Module:
    """Attention with one projection of queries, keys and values."""
    return kind(qkv=nn.Linear(64, 192), out=nn.Linear(64, 64))


def fourier() -> nn.Module:
    """An embedding and two layers of Fourier mixing."""
    mixing = (Residual(FourierMixing()), nn.LayerNorm(64), Residual(mlp(64, 256, 64)), nn.LayerNorm(64))
    return nn.Sequential(nn.Embedding(257, 64), *mixing, nn.Linear(64, 257))


def last_state(kind: type[nn.RNNBase], **options: object) -> nn.Module:
    """Two recurrent layers and a head."""
    return LastState(net=kind(64, 64, num_layers=2, batch_first=True, **options), head=nn.Linear(64, 10))


def tagger() -> nn.Module:
    """The parts of `Tagger`, for nine tags."""
    lstm = nn.LSTM(64, 32, batch_first=True, bidirectional=True)
    return Tagger(embed=nn.Embedding(257, 64, padding_idx=0), lstm=lstm, head=nn.Linear(64, 9))


def gru() -> nn.Module:
    """The parts of `LanguageModel`."""
    parts = {"gru": nn.GRU(64, 64, batch_first=True), "head": nn.Linear(64, 257)}
    return LanguageModel(embed=nn.Embedding(257, 64), **parts)


CASES: tuple[tuple[str, str, Make], ...] = (
    ("grouped-query attention", "attention", lambda: (nn.Sequential(GroupedAttention(), GroupedAttention()), hidden())),
    ("ALiBi", "attention", lambda: (AlibiAttention(qkv=parameter(3, 64, 4, 16), out=parameter(4, 16, 64)), hidden())),
    ("MultiheadAttention", "attention", lambda: (multihead_layer(), (*hidden(), torch.arange(32).expand(8, 32) > 24))),
    ("TransformerEncoder", "attention", lambda: (encoder_decoder_layers()[0], {"src": randn(8, 32, 64)})),
    ("TransformerDecoder", "attention", lambda: (encoder_decoder_layers()[1], (randn(16, 8, 64), randn(24, 8, 64)))),
    ("Transformer", "attention", lambda: (translator(), (tokens(20), tokens(17)))),
    ("Perceiver", "attention", lambda: (perceiver(), (randn(8, 32, 48),))),
    ("linear attention", "attention", lambda: (attention(LinearAttention), hidden())),
    ("sliding window", "attention", lambda: (attention(SlidingWindow), hidden())),
    ("GPT", "attention", lambda: (SmallGPT(), {"tokens": tokens(32), "targets": tokens(32)})),
    ("encoder-decoder, relative positions", "attention", lambda: (EncoderDecoder(), (tokens(24), tokens(16)))),
    ("FNet", "attention", lambda: (fourier(), (tokens(),))),
    ("LSTM", "recurrent", lambda: (last_state(nn.LSTM, dropout=0.1), hidden())),
    ("bidirectional LSTM tagger", "recurrent", lambda: (tagger(), (tokens(), randint(9, (8, 16))))),
    ("GRU language model", "recurrent", lambda: (gru(), (tokens(), torch.zeros(1, 8, 64)))),
    ("RNN", "recurrent", lambda: (last_state(nn.RNN, nonlinearity="relu"), hidden())),
    ("LSTMCell", "recurrent", lambda: (LSTMOverTime(cell=nn.LSTMCell(64, 64), head=nn.Linear(64, 1)), hidden())),
    ("GRUCell with attention", "recurrent", lambda: (attending_decoder(), (tokens(), tokens(9)))),
    ("selective scan", "recurrent", lambda: (nn.Sequential(SelectiveScan(), SelectiveScan()), (randn(8, 16, 64),))),
    ("state space by FFT", "recurrent", lambda: (long_convolution(), hidden())),
)
"""20 cases: name, kind, and how the module and the arguments of one call are made."""
