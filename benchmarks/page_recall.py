"""Attention that pages of keys receive, where a few are chosen by their index.

    python benchmarks/page_recall.py --model FOLDER --text essays.txt \\
        --out benchmarks/results/page_recall_smollm2.json

Documents of essays have four needles each, of which one is asked for. The queries are those of the
answer. In each layer from the third on and each KV head, every score chooses pages of 16 tokens:
the first, the newest, and the best others by the largest score over the head's query heads.

- `all`: share of a query's attention to the document that the chosen pages receive, in per cent.
- `looking_up`: the same, of queries that pay at least 0.3 of it to the needle that is asked for.

`errors` has the distance of attention's output from the full one, in per cent of its size, where
pages that are not chosen are left out (`none`), or one virtual slot stands for each of them (`all`)
or for the best quarter of all pages behind the chosen ones (`quarter`): the mean key, the mean
value, and the log of the page's tokens. Quest itself leaves them out.

Scores: `bounds` are the paper's, by the least and the greatest value of each channel; `mean` is
that of an average key, and `mean ± s` adds s times `Σ_c |q_c| deviation_c`, as `Quest(spread=s)`
does; `best` are the pages that receive most.
"""

from __future__ import annotations

import collections
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from common import parser_of, save
from jaxtyping import Float
from kept_answers import NEEDLES, haystacks
from kept_documents import ReadDocument

import kvjax
from kvjax.generation.model import as_functional
from kvjax.models import from_pretrained, load_tokenizer

PAGE, SHARES, SPREADS = 16, (0.05, 0.1, 0.2), (0.25, 0.5, 1.0, 1.5)
FIRST_LAYER, ROOM = 2, 64
NEEDLE, LOOKS_UP = 20, 0.3  # tokens of a needle, and its share of a query's attention
ESTIMATED_BY = "bounds", "mean ± 1"
Scores = dict[str, Float[np.ndarray, "G P"]]


def scores_of(queries: Float[np.ndarray, "G D"], pages: Float[np.ndarray, "P T D"]) -> Scores:
    """Scores pages in every way but the best."""
    low, high = pages.min(1), pages.max(1)
    bounds = np.maximum(queries[:, None] * low, queries[:, None] * high).sum(-1)
    mean, apart = queries @ pages.mean(1).T, np.abs(queries) @ pages.std(1).T
    return {
        "bounds": bounds, "mean": mean,
        **{f"mean ± {spread:g}": mean + spread * apart for spread in SPREADS},
    }  # fmt: skip


def attended(
    logits: Float[np.ndarray, "G S"], values: Float[np.ndarray, "S D"]
) -> tuple[Float[np.ndarray, "G D"], Float[np.ndarray, "G S"]]:
    """Returns the output of attention, and its weights."""
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return weights @ values, weights


def chosen_pages(
    queries: Float[np.ndarray, "G D"],
    keys: Float[np.ndarray, "S D"],
    values: Float[np.ndarray, "S D"],
    needle: slice,
) -> Iterator[tuple[str, str | None, float, Float[np.ndarray, " G"], Float[np.ndarray, " G"]]]:
    """Yields score, what is estimated, share of the pages, a figure, and what the needle receives.

    The figure is what the chosen pages receive where nothing is said to be estimated (None), and
    else the relative error of the output.
    """
    queries = queries / np.sqrt(keys.shape[1])
    whole, logits = len(keys) // PAGE * PAGE, queries @ keys.T
    output, weights = attended(logits, values)
    of_needle = weights[:, needle].sum(-1)
    of_pages = weights[:, :whole].reshape(len(queries), -1, PAGE).sum(-1)
    key_pages, value_pages = (x[:whole].reshape(-1, PAGE, x.shape[1]) for x in (keys, values))
    virtual = queries @ key_pages.mean(1).T + np.log(PAGE)
    with_means = np.concatenate((values, value_pages.mean(1)))
    scores = scores_of(queries, key_pages)
    for name, score in {**scores, "best": of_pages}.items():
        ranked = score.max(0)
        ranked[[0, -1]] = np.inf
        order = np.argsort(-ranked, kind="stable")
        for share in SHARES:
            count = max(3, int(share * len(order)))
            taken = order[:count]
            yield name, None, share, of_pages[:, taken].sum(-1), of_needle
            if name not in ESTIMATED_BY:
                continue
            read = np.ones(len(keys), bool)
            read[:whole] = np.repeat(np.isin(np.arange(len(order)), taken), PAGE)
            for kind, end in ("none", count), ("quarter", count + len(order) // 4), ("all", None):
                estimated = np.isin(np.arange(len(order)), order[count:end])
                seen = np.concatenate(
                    (np.where(read, logits, -np.inf), np.where(estimated, virtual, -np.inf)), 1
                )
                error = np.linalg.norm(attended(seen, with_means)[0] - output, axis=-1)
                yield name, kind, share, error / np.linalg.norm(output, axis=-1), of_needle


def in_percent(shares: list[float]) -> float:
    """Returns the mean of shares in per cent."""
    return round(100 * float(np.mean(shares)), 1)


def main() -> None:
    """Runs it."""
    parser = parser_of(__doc__, "model", "out")
    parser.add_argument("--text", required=True, help="what needles are hidden in")
    parser.add_argument("--length", type=int, default=1408, help="tokens of a document at most")
    parser.add_argument("--documents", type=int, default=8)
    args = parser.parse_args()
    model = as_functional(from_pretrained(args.model, dtype="float32"))
    tokenizer, text = load_tokenizer(args.model), Path(args.text).read_text()
    method = kvjax.OwnQueries(1.0, room=0)  # notes the queries
    of_all, of_looking_up = (collections.defaultdict(list) for _ in range(2))
    for document in haystacks(tokenizer, text, args.length, args.documents, NEEDLES):
        number = document.number % NEEDLES
        answer, document_end = document.answers[number][0], len(document.tokens)
        tokens = [*document.tokens, *document.questions[number], *answer]
        begin = round(document.depths[number] * document_end)
        needle = slice(begin, begin + NEEDLE)
        # The token before the answer looks for its first token.
        looking = range(len(tokens) - len(answer) - 1, len(tokens) - 1)
        size = args.length + ROOM
        once = ReadDocument(
            model, [tokens], [method], max_prompt=size, max_new=1, buckets=[size],
            document=tokenizer,
        )  # fmt: skip
        for reading in once.readings(method)[FIRST_LAYER:]:
            keys, values = (
                np.asarray(x.read())[0, :, :document_end] for x in (reading.kv.k, reading.kv.v)
            )
            queries = np.asarray(reading.record.slots["query"])[0, :, : len(tokens)]
            for head, at in itertools.product(range(len(keys)), looking):
                for name, estimated, share, figures, of_needle in chosen_pages(
                    queries[head, at], keys[head], values[head], needle
                ):
                    of_all[name, estimated, share].extend(figures)
                    looked_up = figures[of_needle > LOOKS_UP]
                    of_looking_up[name, estimated, share].extend(looked_up)

    def row(name: str, estimated: str | None) -> dict:
        return {
            "score": name,
            **({} if estimated is None else {"estimated": estimated}),
            "all": [in_percent(of_all[name, estimated, share]) for share in SHARES],
            "looking_up": [in_percent(of_looking_up[name, estimated, share]) for share in SHARES],
            "queries": [len(each[name, estimated, SHARES[0]]) for each in (of_all, of_looking_up)],
        }

    measured = dict.fromkeys((name, estimated) for name, estimated, _ in of_all)
    rows = [row(*key) for key in measured if key[1] is None]
    errors = [row(*key) for key in measured if key[1] is not None]
    print(json.dumps(rows, indent=1))
    save(
        args.out,
        {
            "benchmark": "page_recall", "model": Path(args.model).name, "tokens": args.length,
            "documents": args.documents, "page": PAGE, "shares": SHARES, "rows": rows,
            "errors": errors,
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
