"""The requests that a drafter is trained on: read, split, and cut into batches (traffic.py)."""

import collections
import hashlib
import json

import numpy as np

SEED = 31
FEWEST = 50  # different requests
HELD, HELD_FEWEST, HELD_MOST = 0.1, 8, 200  # share of the requests that are held out, and its limits
KEPT_MOST = 8192  # tokens with a row in the embedding
WINDOW, CONTEXT = 512, 2048  # tokens of a training row; positions of the model
SEEN_BEFORE = 4  # a window that begins inside of a request is not trained on in its first 1/4
PROMPT_WEIGHT = 0.1  # of a token's loss; an output token has 1
BATCH = 12 * WINDOW  # tokens of a batch, padding included
POOL = 512  # windows among which rows of similar length are put together
UNKNOWN = 0.005  # share of the input tokens that are replaced by the row for every other token

Request = collections.namedtuple("Request", "prompt output group")


class Refused(Exception):
    """What the caller has to mend. Its text holds no token."""


def read(stream, vocabulary):
    """The requests with an output."""
    requests = []
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            prompt, output = (np.array(fields[name], np.int64).reshape(-1) for name in ("prompt", "output"))
            group = str(fields.get("group") or "default")
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            raise Refused(f"line {number} of the input is not a request") from None
        for ids in (prompt, output):
            if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary:
                raise Refused(f"line {number} of the input has a token that the vocabulary of {vocabulary} lacks")
        if len(output):
            requests.append(Request(prompt.astype(np.int32), output.astype(np.int32), group))
    different = len({share_of(request) for request in requests})
    if different < FEWEST:
        raise Refused(f"{different} different recorded requests with an output are too few to train on: at least {FEWEST} are needed")
    return requests


def share_of(request):
    """A number in [0, 1) for the tokens of each request, the same in every run and in every recording."""
    made = hashlib.sha256(f"{SEED}:{len(request.prompt)}:".encode())
    made.update(request.prompt.tobytes() + request.output.tobytes())
    return int.from_bytes(made.digest()[:8], "big") / 2**64


def split(requests):
    """(requests to train on, requests held out)

    A request's own tokens decide, not its place: when older requests are deleted, what a base was trained on is
    not held out for the next drafter. (Only where HELD_MOST limits the share, and a recording has shrunk, a few
    are.) Of requests with equal tokens one is held out, and the others are on neither side.
    """
    shares = [share_of(request) for request in requests]
    order = sorted(set(shares))
    drawn = sum(share < HELD for share in order)
    held = dict.fromkeys(order[:min(max(drawn, HELD_FEWEST), HELD_MOST)])
    trained = []
    for share, request in zip(shares, requests):
        if share in held:
            held[share] = request
        else:
            trained.append(request)
    return trained, list(held.values())


class Kept:
    """The tokens with a row of their own, in ascending order, and the row of every token."""

    def __init__(self, ids, vocabulary):
        from graph import rows_of

        self.ids, self.vocabulary = np.asarray(ids), vocabulary
        self.rows = rows_of(self.ids, vocabulary)

    @classmethod
    def most_frequent(cls, requests, vocabulary, most=KEPT_MOST):
        counts = np.zeros(vocabulary, np.int64)
        for request in requests:
            for ids in (request.prompt, request.output):
                np.add.at(counts, ids, 1)
        order = np.argsort(-counts, kind="stable")[:most]
        return cls(np.sort(order[counts[order] > 0]), vocabulary)

    def __len__(self):
        return len(self.ids)


def windows(prompt, total, length):
    """Cuts a request: [(start, stop, first)], for training on ids[start:stop] and the targets from `first` on.

    Every output token is a target of one window, with at least a quarter of a window before it where the
    request has so many. The part of a long prompt that no window reaches is left out.
    """
    cut, stop = [], total
    while stop > max(prompt, 1):
        start = max(0, stop - length - 1)
        first = start + length // SEEN_BEFORE if start else 1
        cut.append((start, stop, first))
        stop = first
    return cut[::-1]


class Batches:
    """Rows of similar length, in an order that is fixed by the seed. `at` says how far each length is."""

    def __init__(self, requests, kept):
        self.kept, self.requests, self.at = kept, requests, {WINDOW: [0, 0], CONTEXT: [0, 0]}
        self.rows = [kept.rows[np.concatenate([r.prompt, r.output])] for r in requests]
        self.cut = {length: [(index, *window) for index, r in enumerate(requests)
                             if length == WINDOW or len(self.rows[index]) > WINDOW + 1
                             for window in windows(len(r.prompt), len(self.rows[index]), length)]
                    for length in self.at}
        self.epochs = {}

    def epoch(self, length, number):
        """The windows of each batch of an epoch."""
        if self.epochs.get(length, (None,))[0] != number:
            rng = np.random.default_rng([SEED, length, number])
            order, batches = rng.permutation(len(self.cut[length])), []
            for begin in range(0, len(order), POOL):
                batches += self.grouped(length, order[begin:begin + POOL])
            self.epochs[length] = number, [batches[i] for i in rng.permutation(len(batches))]
        return self.epochs[length][1]

    def grouped(self, length, order):
        made, now = [], []
        for window in sorted((self.cut[length][i] for i in order), key=lambda w: w[2] - w[1]):
            longest = max([window[2] - window[1]] + [w[2] - w[1] for w in now[:1]])
            if now and longest * (len(now) + 1) > BATCH:
                made.append(now)
                now = []
            now.append(window)
        return made + [now] if now else made

    def next(self, length):
        """(rows of input, rows of targets, weights) as arrays [windows, tokens]."""
        epoch, index = self.at[length]
        batches = self.epoch(length, epoch)
        self.at[length] = [epoch, index + 1] if index + 1 < len(batches) else [epoch + 1, 0]
        rng = np.random.default_rng([SEED, length, epoch, index])
        return self.arrays(batches[index], rng)

    def arrays(self, batch, rng):
        width, other = max(stop - start for _, start, stop, _ in batch) - 1, len(self.kept)
        x, y = (np.zeros((len(batch), max(width, 1)), np.int64) for _ in range(2))
        weights = np.zeros(x.shape, np.float32)
        for row, (index, start, stop, first) in enumerate(batch):
            ids, count = self.rows[index][start:stop], stop - start - 1
            x[row, :count], y[row, :count] = ids[:-1], ids[1:]
            places = np.arange(start + 1, stop)
            weights[row, :count] = np.where(places < len(self.requests[index].prompt), PROMPT_WEIGHT, 1.0) * (places >= first)
        weights[y == other] = 0  # the model cannot choose it
        x[rng.random(x.shape) < UNKNOWN] = other
        return x, y, weights
