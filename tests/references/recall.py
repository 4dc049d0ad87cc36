"""Recall of the most attended tokens (arXiv 2412.03213, Figure 11), and the error of attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from .attention import softmax_attention
from .rope import rope


def recall_rate(attention: np.ndarray, kept: Iterable[int], budget: int) -> float:
    """Share of the `budget` most attended tokens that are in `kept`, for one row and KV head.

        a[s] = sum_g attention[g, s]        T = the `budget` tokens s with the highest a[s] > 0,
                                                ties to the lower s
        recall = |T and kept| / |T|             1 if T is empty

    attention: [G, L], of the query heads of one group.  kept: token positions, -1 = none.
    """
    total = np.asarray(attention, np.float64).sum(axis=0)
    by_attention = sorted(range(len(total)), key=lambda s: (-total[s], s))
    top = {s for s in by_attention[:budget] if total[s] > 0}
    return len(top & {int(s) for s in kept}) / len(top) if top else 1.0


def attention_error(output: np.ndarray, full: np.ndarray) -> float:
    """||output - full|| / ||full|| of one row, over everything; 0 where both norms are 0."""
    output, full = np.asarray(output, np.float64).ravel(), np.asarray(full, np.float64).ravel()
    off, size = np.sqrt(np.sum((output - full) ** 2)), np.sqrt(np.sum(full**2))
    if off == 0:
        return 0.0
    return off / size if size > 0 else np.inf


@dataclass
class TinyModel:
    """Attention layers on a residual stream, x + attention(x) Wo, with rotary embedding.

    embed: [V, C], also the output projection.  layers: (Wq [C, Q D], Wk, Wv [C, H D], Wo [Q D, C]).
    sinks: [layers, Q], those of `softmax_attention`.
    """

    embed: np.ndarray
    layers: list[tuple[np.ndarray, ...]]
    kv_heads: int
    head_dim: int
    inv_freq: np.ndarray
    sinks: np.ndarray | None = None

    def sinks_of(self, layer: int, head: int) -> np.ndarray | None:
        """[G]: of the query heads of a KV head."""
        return None if self.sinks is None else self.sinks[layer].reshape(self.kv_heads, -1)[head]

    def heads(self, x: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """[T, C] -> [heads, T, D]."""
        projected = x @ np.asarray(weights, np.float64)
        return projected.reshape(len(x), -1, self.head_dim).transpose(1, 0, 2)

    def read(self, tokens: list[int]) -> tuple[np.ndarray, list[tuple[np.ndarray, ...]]]:
        """Logits after the last token; of each layer rotated q [Q, T, D], k [H, T, D], and v."""
        positions = np.arange(len(tokens))
        x, seen = np.asarray(self.embed, np.float64)[tokens], []
        for layer, (wq, wk, wv, wo) in enumerate(self.layers):
            q = rope(self.heads(x, wq), positions, self.inv_freq)
            k = rope(self.heads(x, wk), positions, self.inv_freq)
            v = self.heads(x, wv)
            seen.append((q, k, v))
            outs = [
                softmax_attention(
                    q_group,
                    k[head],
                    v[head],
                    positions,
                    positions,
                    sinks=self.sinks_of(layer, head),
                )[0]
                for head, q_group in enumerate(q.reshape(self.kv_heads, -1, *q.shape[1:]))
            ]
            merged = np.concatenate(outs).transpose(1, 0, 2).reshape(len(tokens), -1)
            x = x + merged @ np.asarray(wo, np.float64)
        return x[-1] @ np.asarray(self.embed, np.float64).T, seen

    def compressed(
        self, turns: list[list[int]], new_tokens: int, method: Callable[[int, int], object]
    ) -> tuple[list[np.ndarray], list[int]]:
        """Logits after each prompt and after the greedy continuation, and that continuation.

        Prompts and the tokens that follow go through references `method(layer, head)` with `prompt`
        and `decode`; one that repositions gets q and k unrotated.
        """
        references = [
            [method(layer, head) for head in range(self.kv_heads)]
            for layer in range(len(self.layers))
        ]

        def logits(tokens: list[int], at: np.ndarray, is_prompt: bool) -> np.ndarray:
            x = np.asarray(self.embed, np.float64)[tokens]
            for (wq, wk, wv, wo), heads in zip(self.layers, references, strict=True):
                q, k, v = (self.heads(x, weights) for weights in (wq, wk, wv))
                outs = []
                for head, own in enumerate(heads):
                    group, key = q.reshape(self.kv_heads, -1, *q.shape[1:])[head], k[head]
                    if not getattr(own, "reposition", False):
                        group, key = (rope(x, at, self.inv_freq) for x in (group, key))
                    if is_prompt:
                        outs.append(own.prompt(group, key, v[head], at))
                    else:
                        out = own.decode(group[:, 0], key[0], v[head][0], int(at[0]))
                        outs.append(out[:, None])
                merged = np.concatenate(outs).transpose(1, 0, 2).reshape(len(tokens), -1)
                x = x + merged @ np.asarray(wo, np.float64)
            return x[-1] @ np.asarray(self.embed, np.float64).T

        start, after = 0, []
        for turn in turns:
            after.append(logits(turn, start + np.arange(len(turn)), is_prompt=True))
            start += len(turn)
        new, last = [], after[-1]
        for position in range(start, start + new_tokens):
            new.append(int(np.argmax(last)))
            last = logits(new[-1:], np.array([position]), is_prompt=False)
        return [*after, last], new

    def go_on(self, prompt: list[int], new_tokens: int) -> list[int]:
        """The prompt and its greedy continuation."""
        tokens = list(prompt)
        for _ in range(new_tokens):
            tokens.append(int(np.argmax(self.read(tokens)[0])))
        return tokens


def fidelity(
    model: TinyModel,
    prompt: list[int],
    method: Callable[[int, int], object],
    budget: int | None = None,
    new_tokens: int = 1,
    question: list[int] | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Recall [layers, H], error [layers] and error by head [layers, H] of one row.

    All are means over the new tokens.  Every layer of the full cache's run gives q, k and v to
    `method(layer, head)`, a reference with `prompt`, `decode` and `kept`; one that repositions gets
    q and k unrotated.  A question is a second prompt, which follows the first.  Without a budget it
    is the number of tokens that the method looks at: what it has kept, and the new one.
    """
    turns = [prompt] if question is None else [prompt, question]
    tokens = model.go_on([token for turn in turns for token in turn], new_tokens)
    _, layers = model.read(tokens)
    steps = range(sum(map(len, turns)), len(tokens))
    recall = np.zeros((len(layers), model.kv_heads, new_tokens))
    error, head_error = np.zeros((len(layers), new_tokens)), np.zeros_like(recall)
    for layer, (q, k, v) in enumerate(layers):
        q = q.reshape(model.kv_heads, -1, *q.shape[1:])
        outs, full = [], []
        for head in range(model.kv_heads):
            own, own_q, own_k = method(layer, head), q[head], k[head]
            if getattr(own, "reposition", False):
                back = -np.arange(len(tokens))
                own_q, own_k = (rope(x, back, model.inv_freq) for x in (own_q, own_k))
            start = 0
            for turn in turns:
                at = np.arange(start, start + len(turn))
                own.prompt(own_q[:, at], own_k[at], v[head][at], at)
                start += len(turn)
            for step, at in enumerate(steps):
                looked_at = [*own.kept, at]
                outs.append(own.decode(own_q[:, at], own_k[at], v[head][at], at))
                out, p = softmax_attention(
                    q[head][:, at : at + 1], k[head][: at + 1], v[head][: at + 1],
                    np.array([at]), np.arange(at + 1), sinks=model.sinks_of(layer, head),
                )  # fmt: skip
                full.append(out[:, 0])
                size = len(looked_at) if budget is None else budget
                recall[layer, head, step] = recall_rate(p[:, 0], looked_at, size)
        outs, full = (np.reshape(x, (model.kv_heads, new_tokens, -1)) for x in (outs, full))
        for step in range(new_tokens):
            error[layer, step] = attention_error(outs[:, step], full[:, step])
            for head in range(model.kv_heads):
                head_error[layer, head, step] = attention_error(outs[head, step], full[head, step])
    return recall.mean(-1), error.mean(-1), head_error.mean(-1)
