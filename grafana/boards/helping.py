"""Is it helping? Time per token against the control group, time saved and lost, and the cost for the engine."""

from .panels import Dashboard, Panel, Query, lines, stat
from .promql import increase, of, quantile, rate, ratio, share

# Ratios of times: faster, no relevant difference, slower. The `control` gate of the default policy closes at 1.02.
FASTER = ((None, "green"), (0.98, "yellow"), (1.02, "red"))
SLOWER = ((None, "green"), (1, "yellow"), (2, "red"))
# Speedups: below 1 speculation would have been slower.
SPEEDUP = ((None, "red"), (0.98, "yellow"), (1.02, "green"))
ACCEPTANCE = ((None, "red"), (0.2, "yellow"), (0.4, "green"))
ACCEPTED, DRAFTED, ROUNDS = (
    "foretell_spec_decode_num_accepted_tokens_total",
    "foretell_spec_decode_num_draft_tokens_total",
    "foretell_spec_decode_num_drafts_total",
)
GATE = 'gate="control"'
CONTROL, PROJECTED = (
    "foretell_control_group_ratio",
    "foretell_projected_speedup",
)
SAVED, WASTED, EXTRA = (
    "foretell_saved_seconds_total",
    "foretell_wasted_seconds_total",
    "foretell_extra_prefill_tokens_total",
)
OUTPUT, ELIGIBLE = "foretell_output_tokens_total", 'path=~"plain|speculated"'
TTFT, TPOT = "gen_ai_server_time_to_first_token_seconds", "gen_ai_server_time_per_output_token_seconds"
ASK_WHY = "open “why did it not speculate?”; if acceptance is low, open “how good are the drafts?”."


def bound_of(series: str, bound: str) -> str:
    """One bound of an interval."""
    return of(series, f'bound="{bound}"')


def envelope(series: str, by: str) -> tuple[Query, ...]:
    """The bounds of an interval over processes, each with its own: the lowest, the mean and the highest."""
    names = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    return tuple(
        Query(f"{function} by ({by}) ({bound_of(series, bound)})", f"{names} {bound}")
        for function, bound in (("min", "low"), ("avg", "middle"), ("max", "high"))
    )


def by_path(histogram: str, title: str, says: str):
    """Median and 95th percentile of a time, by path."""
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
            f"above is a fair comparison."
        ),
        good="`speculated` is at or below `plain`.",
        otherwise="check the ratio to the control group first: the requests of one path may be easier than the others.",
    )


def net() -> str:
    """Seconds saved less seconds lost, per second. A process that has lost none has no series for losses."""
    return f"{rate(SAVED)} - ({rate(WASTED)} or vector(0))"


def promise(over: str) -> str:
    """Seconds of eligible requests ÷ the seconds that plain decoding would have taken, within `over`."""
    spent = increase("gen_ai_server_request_duration_seconds_sum", ELIGIBLE, over=over)
    return ratio(spent, f"({spent} + ({increase(SAVED, over=over)} - ({increase(WASTED, over=over)} or vector(0))))")


def short() -> tuple[Panel, ...]:
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
                "`yes` or `perhaps` if a policy makes answers slower than a direct request to the engine. `perhaps`: "
                "the measured ratio is above 1.02; `yes`: the lower bound of its interval is too, or the `control` "
                "gate is closed, because a loss was found or recent speculation cost more than it saved."
            ),
            good="`no`.",
            otherwise=(
                "at `yes` requests are decoded plainly until the gate opens again; if it closes each time, set the "
                "mode to `observe` and "
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
                "Time per token of eligible requests, divided by that of the control group; the worst "
                "process and backend of each policy."
            ),
            good="below 0.98 (green): answers are faster. 0.98 to 1.02 (yellow): no relevant difference.",
            otherwise="above 1.02 (red) speculation costs time: " + ASK_WHY,
        ),
        stat(
            "Time ÷ plain decoding",
            "none",
            Query(promise("$__range")),
            steps=((None, "green"), (1, "yellow"), (1.01, "red")),
            absent="no rounds yet",
            defaults={"decimals": 3},
            says=(
                "The promise: seconds of all eligible requests, divided by the seconds that plain "
                "decoding at the measured pace would have taken, in the time range. The regret budget keeps it at "
                "most at 1.01, and its capacity."
            ),
            good="below 1 (green).",
            otherwise="above 1.01 (red) over an hour or more the promise is broken: " + ASK_WHY,
        ),
        stat(
            "Net time saved",
            "s",
            Query(f"{increase(SAVED)} - ({increase(WASTED)} or vector(0))"),
            steps=((None, "red"), (0, "green")),
            says="Seconds of answers that rounds saved, less those that rounds and switches lost, in the time range.",
            good="above 0, and growing with traffic.",
            otherwise="below 0 (red) rounds lost more than they saved: " + ASK_WHY,
        ),
        stat(
            "Acceptance rate",
            "percentunit",
            Query(ratio(rate(ACCEPTED), rate(DRAFTED))),
            steps=ACCEPTANCE,
            says="Drafted tokens that became output ÷ drafted tokens.",
            good=(
                "above 40 % (green). The acceptance that pays depends on the engine's costs: the ratio to the control "
                "group is decisive."
            ),
            otherwise=(
                "below 20 % (red) the acceptance gate of the default policy closes: open “how good are the drafts?”."
            ),
        ),
        stat(
            "Mean acceptance length",
            "none",
            Query(f"1 + {ratio(rate(ACCEPTED), rate(ROUNDS))}"),
            defaults={"decimals": 2},
            steps=((None, "red"), (1.2, "yellow"), (1.5, "green")),
            says="Mean tokens per round: 1 + accepted tokens ÷ rounds that decided a token.",
            good="above 1.5 (green).",
            otherwise="near 1 (red) drafts have no effect: open “how good are the drafts?”.",
        ),
        stat(
            "Projected speedup",
            "none",
            Query(f"min by (policy) ({bound_of(PROJECTED, 'middle')})", "{{policy}}"),
            steps=SPEEDUP,
            absent="no shadow drafts",
            defaults={"decimals": 2},
            says=(
                "In mode `observe`: projected speedup from drafts made in the shadow: plain time ÷ projected time; the "
                "lowest of each policy."
            ),
            good="above 1.02 (green): use mode `auto`.",
            otherwise="stay in `observe` (docs/getting-started.md).",
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
                "Time per token of eligible requests, divided by that of the control group, with an "
                "interval that is valid at any time. Over several processes: lowest `low`, mean, highest `high`."
            ),
            good="`high` below 1: certainly faster. Between the lines (0.98 and 1.02): no relevant difference.",
            otherwise=(
                "`low` above 1.02: certainly slower; the `control` gate closes and the ratio begins anew. `low` below "
                "and `high` above 1: wait, or raise `holdback`."
            ),
        ),
        lines(
            "Time saved and lost per hour",
            "s",
            Query(f"3600 * ({net()})", "net"),
            Query(f"3600 * {rate(SAVED)}", "saved"),
            Query(f"-3600 * {rate(WASTED)}", "lost"),
            steps=((None, "red"), (0, "green")),
            width=12,
            says="Seconds of answers that rounds saved and lost against plain decoding at the measured pace, per hour.",
            good="`net` is above 0.",
            otherwise="below 0 for more than a few minutes: " + ASK_WHY,
        ),
        lines(
            "Time ÷ plain decoding, by hour",
            "none",
            Query(promise("1h"), "hour before"),
            steps=((None, "green"), (1, "yellow"), (1.01, "red")),
            width=12,
            absent="no rounds yet",
            says=(
                "The promise by hour: seconds of eligible requests ÷ those that plain decoding would "
                "have taken, in the hour before each point. Its maximum is the worst hour."
            ),
            good="below 1.",
            otherwise="above 1.01 for an hour the promise is broken: " + ASK_WHY,
        ),
        lines(
            "Projected speedup (observe)",
            "none",
            *envelope(PROJECTED, "policy, backend"),
            steps=SPEEDUP,
            width=12,
            absent="no shadow drafts",
            says="Projected speedup of requests that were decoded plainly, with its interval.",
            good="`low` above 1.02: change to `auto`.",
            otherwise="`high` below 1.02: no gain for this traffic; stay in `observe`.",
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
                "Share of requests by path: `speculated`, `plain` (eligible, decoded plainly), `passthrough` (passed on "
                "unchanged)."
            ),
            good="mostly `speculated` once the mode is `auto`.",
            otherwise="much `plain` or `passthrough`: open “why did it not speculate?”.",
        ),
        lines(
            "Output tokens per second",
            "short",
            Query(rate(OUTPUT, by="path"), "{{path}}"),
            stack=True,
            says="Output tokens per second by path; those of passthrough answers without usage are estimated.",
            good="follows the traffic.",
            otherwise=(
                "a drop at steady requests: the engine is slower; look at its load in “why did it not speculate?”."
            ),
        ),
        lines(
            "Control group",
            "reqps",
            Query(rate("foretell_control_group_requests_total", by="policy"), "{{policy}}"),
            says="Eligible requests in the control group, which is decoded plainly, per second.",
            good="always a few: without them there is no comparison above.",
            otherwise="none: `holdback.floor` is 0, or no request is eligible.",
        ),
    )


def costs() -> tuple[Panel, ...]:
    """The row “What it costs the engine”."""
    return (
        lines(
            "Extra tokens computed per output token",
            "none",
            Query(ratio(rate(EXTRA), rate(OUTPUT, ELIGIBLE)), "all"),
            Query(
                ratio(rate(EXTRA, by="backend"), rate(OUTPUT, ELIGIBLE), "ignoring (backend) group_left ()"),
                "{{backend}}",
            ),
            steps=((None, "green"), (0.25, "yellow"), (1, "red")),
            width=12,
            says=(
                "Tokens that engines computed for verify requests beyond those that became output, per output token of "
                "eligible requests."
            ),
            good="below 0.25.",
            otherwise=(
                "above 1 (red) the engine computes more tokens in vain than for answers: lower "
                "`gamma.max`."
            ),
        ),
        lines(
            "Verify requests",
            "reqps",
            Query(rate("foretell_verify_requests_total", by="backend, method"), "{{backend}} {{method}}"),
            width=12,
            says=(
                "Verify requests sent to engines per second, by verification method. Engines show them in their own "
                "logs and counters, in addition to those of clients."
            ),
            good="the engine's request count is that of clients plus this one.",
            otherwise=(
                "if the engine limits requests or scales by them, allow for these; `fan_out` makes one prompt per "
                "draft position."
            ),
        ),
    )


def board() -> Dashboard:
    """The dashboard."""
    return Dashboard(
        "helping",
        "is it helping?",
        "Speed of answers with speculation against a control group without it, and the cost for the engine.",
        (
            ("In short", short()),
            ("Against no speculation", compared()),
            ("What users see", users()),
            ("What it costs the engine", costs()),
        ),
    )
