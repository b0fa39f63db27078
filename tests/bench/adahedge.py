#!/usr/bin/env python3
"""AdaHedge vectors for `src/core/control/hedge.rs`.

Figure 1 of de Rooij, van Erven, Grünwald, Koolen (JMLR 15, 2014). Losses and the mixability gap
decay by 1/200 with every round, which is not part of the paper.
"""

import math

KEEP = 1 - 1 / 200
LOSSES = [[0.5, 0.4, 0.9], [0.3, 0.7, 0.2], [0.6, 0.1, 0.4], [0.2, 0.2, 0.9], [0.9, 0.3, 0.1]]


def mix(eta, losses):
    """Weights and log-loss -ln(sum exp(-eta L))/eta of uniform weights."""
    least = min(losses)
    if eta == math.inf:
        return [float(loss == least) / losses.count(least) for loss in losses], least
    raw = [math.exp(-eta * (loss - least)) for loss in losses]
    total = sum(raw)
    return [one / total for one in raw], least - math.log(total / len(losses)) / eta


def main():
    sums, gap = [0.0] * 3, 0.0
    for losses in LOSSES:
        eta = math.inf if gap == 0 else math.log(3) / gap
        weights, before = mix(eta, sums)
        expected = sum(weight * loss for weight, loss in zip(weights, losses))
        sums = [total + loss for total, loss in zip(sums, losses)]
        _, after = mix(eta, sums)
        gap = KEEP * (gap + max(0.0, expected - (after - before)))
        sums = [KEEP * total for total in sums]
    print(mix(math.log(3) / gap, sums)[0], gap)


if __name__ == "__main__":
    main()
