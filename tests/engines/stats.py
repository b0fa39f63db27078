"""The statistical tests, written out because only the standard library is available."""

import math


def gamma_upper(a, x):
    """Regularised upper incomplete gamma function Q(a, x)."""
    if x <= 0:
        return 1.0
    front = math.exp(-x + a * math.log(x) - math.lgamma(a))
    if x < a + 1:
        term = total = 1.0 / a
        n = a
        while abs(term) > abs(total) * 1e-16:
            n += 1
            term *= x / n
            total += term
        return max(0.0, 1.0 - front * total)
    tiny = 1e-300  # Lentz's continued fraction
    b, c, d = x + 1 - a, 1 / tiny, 1 / (x + 1 - a)
    h = d
    for i in range(1, 10000):
        an = -i * (i - a)
        b += 2
        d = an * d + b
        d = 1 / (d if abs(d) > tiny else tiny)
        c = b + an / c
        c = c if abs(c) > tiny else tiny
        h *= d * c
        if abs(d * c - 1) < 1e-16:
            break
    return front * h


def chi_square(value, freedom):
    """P(chi-square with `freedom` degrees >= value)."""
    return gamma_upper(freedom / 2, value / 2)


def merged(left, right, least=5.0):
    """Pairs of counts; those whose smaller expected count is below `least` are merged."""
    n, m = sum(left.values()), sum(right.values())
    small, cells = [0, 0], []
    for key in set(left) | set(right):
        pair = (left.get(key, 0), right.get(key, 0))
        if sum(pair) * min(n, m) / (n + m) < least:
            small = [small[0] + pair[0], small[1] + pair[1]]
        else:
            cells.append(pair)
    if sum(small):
        if sum(small) * min(n, m) / (n + m) >= least or not cells:
            cells.append(tuple(small))
        else:  # too few even merged: they join the smallest cell
            cells.sort(key=sum)
            cells[0] = (cells[0][0] + small[0], cells[0][1] + small[1])
    return cells


def homogeneity(left, right):
    """(p, degrees of freedom) that two counts of tokens come from one distribution."""
    cells = merged(left, right)
    n, m = sum(left.values()), sum(right.values())
    if len(cells) < 2:
        return 1.0, 0
    value = 0.0
    for a, b in cells:
        share = (a + b) / (n + m)
        value += (a - n * share) ** 2 / (n * share) + (b - m * share) ** 2 / (m * share)
    return chi_square(value, len(cells) - 1), len(cells) - 1


def binomial_upper(k, n, p):
    """P(X >= k) of n trials at p."""
    if k <= 0:
        return 1.0
    logs = [math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1)
            + i * math.log(p) + (n - i) * math.log1p(-p) for i in range(k, n + 1)]
    return min(1.0, sum(map(math.exp, logs)))


def more_often(events, trials, base_events, base_trials):
    """p of this many events at the baseline's rate: two Poisson rates, exact, one-sided."""
    total = events + base_events
    if total == 0 or trials == 0 or base_trials == 0:
        return 1.0
    return binomial_upper(events, total, trials / (trials + base_trials))


def median(values):
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
