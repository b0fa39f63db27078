"""Is it helping? Time per token against requests that were held back, time won and lost, and what it costs the engine."""

from .panels import Dashboard, Panel, Query, lines, stat
from .promql import increase, of, quantile, rate, ratio, share

# Of a ratio of times: faster, no difference worth a name, slower. The latency gate of the default policy closes at 1.02.
FASTER = ((None, "green"), (0.98, "yellow"), (1.02, "red"))
SLOWER = ((None, "green"), (1, "yellow"), (2, "red"))
# Of a gain: below 1 leaping would have been slower.
GAIN = ((None, "red"), (0.98, "yellow"), (1.02, "green"))
ACCEPTANCE = ((None, "red"), (0.2, "yellow"), (0.4, "green"))
ACCEPTED, DRAFTED, LEAPS = (
    "foretell_leap_accepted_tokens_total",
    "foretell_leap_draft_tokens_total",
    "foretell_leaps_total",
)
GATE = 'gate="latency"'
CONTROL, SWITCHBACK, GAINED = "foretell_control_group_ratio", "foretell_switchback_ratio", "foretell_would_gain"
SAVED, WASTED, EXTRA = (
    "foretell_saved_seconds_total",
    "foretell_wasted_seconds_total",
    "foretell_extra_prefill_tokens_total",
)
TTFT, TPOT = "gen_ai_server_time_to_first_token_seconds", "gen_ai_server_time_per_output_token_seconds"
ASK_WHY = "open “why did it not speculate?”; with little acceptance open “how good are the drafts?”."


def bound_of(series: str, bound: str) -> str:
    """One bound of an interval."""
    return of(series, f'bound="{bound}"')


def envelope(series: str, by: str) -> tuple[Query, ...]:
    """The bounds of an interval that every process has of its own: the lowest, the mean and the highest over processes."""
    names = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    return tuple(
        Query(f"{function} by ({by}) ({bound_of(series, bound)})", f"{names} {bound}")
        for function, bound in (("min", "low"), ("avg", "middle"), ("max", "high"))
    )


def by_path(histogram: str, title: str, says: str):
    """Median and 95th percentile of a time, for each way in which requests were served."""
    queries = (
        Query(quantile(rank, histogram, by="path"), f"{{{{path}}}} {name}")
        for rank, name in ((0.5, "p50"), (0.95, "p95"))
    )
    return lines(
        title,
        "s",
        *queries,
        width=12,
        says=(
            f"{says}, median and 95th percentile by path. Paths serve different requests: only the control group "
            f"above compares like with like."
        ),
        good="`speculated` is at or below `ridden`.",
        otherwise=(
            "look at the ratio to the control group before you conclude anything: easy requests may ride, hard ones "
            "leap."
        ),
    )


def net() -> str:
    """Seconds won less seconds lost, per second. A process that has lost none has no series of it."""
    return f"{rate(SAVED)} - ({rate(WASTED)} or vector(0))"


def verdict() -> tuple[Panel, ...]:
    """The row “In short”."""
    low, middle = bound_of(CONTROL, "low"), bound_of(CONTROL, "middle")
    lost = f"{of('foretell_gate_open', GATE)} == 0"
    return (
        stat(
            "Slower than direct?",
            "none",
            Query(f"max(({low} > bool 1.02) + ignoring (bound) ({middle} > bool 1.02) or ({lost}) + 2)"),
            steps=SLOWER,
            states={0: ("no", "green"), 1: ("perhaps", "yellow"), 2: ("yes", "red")},
            absent="no comparison yet",
            says=(
                "Whether a policy makes answers slower than going to the engine directly. `perhaps`: the measured "
                "ratio is above 1.02; `yes`: the lower bound of its interval is too, or the gate `latency` is closed, "
                "because a loss was found and the ratio begins anew."
            ),
            good="`no`.",
            otherwise=(
                "at `yes` requests ride until the gate opens to try again; if it closes each time, set the mode to "
                "`observe` and "
            )
            + ASK_WHY,
        ),
        stat(
            "Time per token ÷ control",
            "none",
            Query(f"max by (policy) ({middle})", "{{policy}}"),
            steps=FASTER,
            absent="no comparison yet",
            defaults={"decimals": 3},
            says=(
                "Time per token of requests that may leap, divided by that of requests held back; the worst process "
                "and backend of each policy."
            ),
            good="below 0.98 (green): answers are faster. 0.98 to 1.02 (yellow) makes no difference.",
            otherwise="above 1.02 (red) it costs time: " + ASK_WHY,
        ),
        stat(
            "Net time won",
            "s",
            Query(f"{increase(SAVED)} - ({increase(WASTED)} or vector(0))"),
            steps=((None, "red"), (0, "green")),
            says="Seconds of answers that rounds won, less those that rounds and switches lost, within the time shown.",
            good="above 0, and growing with traffic.",
            otherwise="below 0 (red) rounds lost more than they won: " + ASK_WHY,
        ),
        stat(
            "Acceptance rate",
            "percentunit",
            Query(ratio(rate(ACCEPTED), rate(DRAFTED))),
            steps=ACCEPTANCE,
            says="Drafted tokens that became output ÷ drafted tokens.",
            good=(
                "above 40 % (green). What pays depends on the engine's costs: the ratio to the control group decides,"
                " not this."
            ),
            otherwise=(
                "below 20 % (red) the acceptance gate of the default policy closes: open “how good are the drafts?”."
            ),
        ),
        stat(
            "Mean acceptance length",
            "none",
            Query(f"1 + {ratio(rate(ACCEPTED), rate(LEAPS))}"),
            defaults={"decimals": 2},
            steps=((None, "red"), (1.2, "yellow"), (1.5, "green")),
            says="Tokens that one round brings: 1 + accepted tokens ÷ rounds that decided a token.",
            good="above 1.5 (green).",
            otherwise="near 1 (red) drafts bring nothing: open “how good are the drafts?”.",
        ),
        stat(
            "Would have gained",
            "none",
            Query(f"min by (policy) ({bound_of(GAINED, 'middle')})", "{{policy}}"),
            steps=GAIN,
            absent="nothing drafted in the shadow",
            defaults={"decimals": 2},
            says=(
                "In mode `observe`: how many times as fast requests would have been by what was drafted in the shadow."
            ),
            good="above 1.02 (green): mode `auto` is worth it.",
            otherwise="stay in `observe`; the first-day guide says what to change.",
        ),
    )


def compared() -> tuple[Panel, ...]:
    """The row “Against no speculation”."""
    return (
        lines(
            "Time per token ÷ control group",
            "none",
            *envelope(CONTROL, "policy, backend"),
            steps=FASTER,
            width=12,
            absent="no comparison yet",
            says=(
                "Time per token of requests that may leap, divided by that of the held back ones, with an interval "
                "that is valid at any time. Over several processes: the lowest low, the mean, the highest high."
            ),
            good="`high` below 1: certainly faster. The lines at 0.98 and 1.02 bound what makes no difference.",
            otherwise=(
                "`low` above 1.02: certainly slower; the gate `latency` closes and the ratio begins anew. `low` "
                "below and `high` above 1: wait, or raise `holdback`."
            ),
        ),
        lines(
            "Time per token ÷ ride-only windows",
            "none",
            *envelope(SWITCHBACK, "replica"),
            steps=FASTER,
            width=12,
            absent="no comparison yet",
            says=(
                "Time per token of a replica outside of its ride-only windows, divided by that inside. Unlike the "
                "control group it sees what leaping costs the requests beside it."
            ),
            good="`high` below 1.",
            otherwise=(
                "above 1.02 while the control group is below: leaping speeds up its own requests at the cost of "
                "others; lower `budget.extra_tokens`."
            ),
        ),
        lines(
            "Time won and lost per hour",
            "s",
            Query(f"3600 * ({net()})", "net"),
            Query(f"3600 * {rate(SAVED)}", "won"),
            Query(f"-3600 * {rate(WASTED)}", "lost"),
            steps=((None, "red"), (0, "green")),
            width=12,
            says="Seconds of answers that rounds won and lost against riding at the measured pace, per hour.",
            good="the net is above 0.",
            otherwise="below 0 for more than some minutes: " + ASK_WHY,
        ),
        lines(
            "Would have gained (observe)",
            "none",
            *envelope(GAINED, "policy, backend"),
            steps=GAIN,
            width=12,
            absent="nothing drafted in the shadow",
            says="How many times as fast requests that did not leap would have been, with its interval.",
            good="`low` above 1.02: change to `auto`.",
            otherwise="`high` below 1.02: this traffic does not gain; stay in `observe`.",
        ),
    )


def users() -> tuple[Panel, ...]:
    """The row “What users see”."""
    return (
        by_path(TTFT, "Time to first token", "Time from accepting a request to the first byte of its answer's body"),
        by_path(TPOT, "Time per output token", "Time per output token after the first"),
        lines(
            "Share of requests by path",
            "percentunit",
            Query(share("foretell_requests_total", "path"), "{{path}}"),
            stack=True,
            defaults={"min": 0, "max": 1},
            says=(
                "How requests were served: `speculated`, `ridden` (eligible, did not leap), `bypassed` (may not "
                "leap), `relayed` (no completions)."
            ),
            good="most are `speculated` once the mode is `auto`.",
            otherwise="much `ridden` or `bypassed`: open “why did it not speculate?”.",
        ),
        lines(
            "Output tokens per second",
            "short",
            Query(rate("foretell_output_tokens_total", by="path"), "{{path}}"),
            stack=True,
            says="Output tokens of completions per second, by path.",
            good="follows the traffic.",
            otherwise=(
                "a fall at steady requests: the engine is slower; look at its load in “why did it not speculate?”."
            ),
        ),
        lines(
            "Requests held back",
            "reqps",
            Query(rate("foretell_holdback_requests_total", by="policy"), "{{policy}}"),
            says="Eligible requests that were held back as control group, per second.",
            good="a few, always: without them nothing above is measured.",
            otherwise="none at all: `holdback.floor` is 0, or no request is eligible.",
        ),
    )


def costs() -> tuple[Panel, ...]:
    """The row “What it costs the engine”."""
    return (
        lines(
            "Extra tokens computed per output token",
            "none",
            Query(ratio(rate(EXTRA), rate("foretell_output_tokens_total")), "all"),
            Query(
                ratio(
                    rate(EXTRA, by="backend"), rate("foretell_output_tokens_total"), "ignoring (backend) group_left ()"
                ),
                "{{backend}}",
            ),
            steps=((None, "green"), (0.25, "yellow"), (1, "red")),
            width=12,
            says="Tokens that engines computed for verify calls beyond those that became output, per output token.",
            good="below 0.25, the default of `budget.extra_tokens`.",
            otherwise=(
                "above 1 (red) the engine computes more in vain than for answers: lower `budget.extra_tokens` or "
                "`gamma.max`."
            ),
        ),
        lines(
            "Verify calls",
            "reqps",
            Query(rate("foretell_verify_calls_total", by="backend, plan"), "{{backend}} {{plan}}"),
            width=12,
            says=(
                "Rounds asked of engines per second, by plan: requests that their own logs and counters show beside "
                "those of clients."
            ),
            good="the engine's requests are those of clients plus these.",
            otherwise=(
                "if the engine limits requests or scales by them, allow for these calls; `fan_out` makes one prompt "
                "for each drafted place."
            ),
        ),
    )


def board() -> Dashboard:
    """The dashboard."""
    return Dashboard(
        "helping",
        "is it helping?",
        "Whether answers are faster than without Foretell, measured against requests that were held back, and at what cost.",
        (
            ("In short", verdict()),
            ("Against no speculation", compared()),
            ("What users see", users()),
            ("What it costs the engine", costs()),
        ),
    )
