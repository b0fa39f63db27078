"""How good are the drafts? What is accepted, by place, drafter, prompt and policy, and what drafting costs."""

from .panels import NONE, Dashboard, Panel, Query, axis_right, bars, heatmap, lines, stat
from .promql import increase, of, quantile, rate, ratio

ACCEPTED, DRAFTED, LEAPS = (
    "foretell_leap_accepted_tokens_total",
    "foretell_leap_draft_tokens_total",
    "foretell_leaps_total",
)
AT_PLACE, REACHED = "foretell_leap_accepted_tokens_per_pos_total", "foretell_leap_draft_tokens_per_pos_total"
ACCEPTANCE = ((None, "red"), (0.2, "yellow"), (0.4, "green"))
SHARE = {"min": 0, "max": 1}
FEW = 'position=~"0|1|3|7|15|31"'


def accepted_by(label: str, title: str, good: str, otherwise: str) -> Panel:
    """Acceptance for each value of a label."""
    quotient = ratio(rate(ACCEPTED, by=label), rate(DRAFTED, by=label))
    return lines(
        title,
        "percentunit",
        Query(quotient, f"{{{{{label}}}}}"),
        steps=ACCEPTANCE,
        defaults=SHARE,
        says=(
            "Drafted tokens that became output ÷ drafted tokens. The lines at 20 % (the acceptance gate of the "
            "default policy) and 40 % are bounds of colour."
        ),
        good=good,
        otherwise=otherwise,
    )


def short() -> tuple[Panel, ...]:
    """The row “In short”."""
    return (
        stat(
            "Acceptance rate",
            "percentunit",
            Query(ratio(rate(ACCEPTED), rate(DRAFTED))),
            steps=ACCEPTANCE,
            says="Drafted tokens that became output ÷ drafted tokens.",
            good="above 40 % (green).",
            otherwise=(
                "below 20 % (red) the acceptance gate of the default policy closes: find by which drafter, prompt or "
                "policy below."
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
            otherwise="near 1 (red) drafts bring nothing.",
        ),
        stat(
            "Collapses and plateaus",
            "none",
            Query(increase("foretell_acceptance_anomaly_total", by="kind"), "{{kind}}"),
            steps=((None, "green"), (1, "yellow"), (10, "red")),
            width=8,
            says=(
                "Quality alarms within the time shown: a `collapse` of an acceptance that used to be high, a "
                "`plateau` of an output that repeats itself."
            ),
            good="0.",
            otherwise=(
                "`collapse`: the engine's model or its settings were changed, or the traffic was. `plateau`: look at "
                "outputs, the model may loop."
            ),
        ),
        stat(
            "Drift, total variation",
            "none",
            Query(increase("foretell_drift_tv_total", by="policy"), "{{policy}}"),
            steps=NONE,
            width=8,
            absent="exact rules only",
            says=(
                "Total variation charged to outputs within the time shown. Per output, its mean bounds how far their "
                "distribution is from the target's."
            ),
            good="0 by the exact rule.",
            otherwise=(
                "expected where a policy has a lossy rule and `max_drift` says how much; anywhere else report it as a"
                " bug."
            ),
        ),
    )


def where() -> tuple[Panel, ...]:
    """The row “Where they are good”."""
    return (
        bars(
            "Acceptance by place in the draft",
            "percentunit",
            "position",
            Query(ratio(increase(AT_PLACE, by="position"), increase(REACHED, by="position"))),
            width=12,
            defaults=SHARE,
            says="Of the rounds within the time shown whose draft reached a place, the share that accepted it.",
            good="falls slowly from left to right.",
            otherwise=(
                "a cliff after a few places: lower `gamma.max` to where it is. Low at place 0: the drafter does not "
                "fit the target."
            ),
        ),
        lines(
            "Acceptance by place over time",
            "percentunit",
            Query(ratio(rate(AT_PLACE, FEW, by="position"), rate(REACHED, FEW, by="position")), "place {{position}}"),
            width=12,
            defaults=SHARE,
            says="Of rounds whose draft reached a place, the share that accepted it; the places 0, 1, 3, 7, 15 and 31.",
            good="steady.",
            otherwise=(
                "a fall of all places at once: a change of model, prompt template or traffic; compare with the "
                "annotations."
            ),
        ),
        accepted_by(
            "drafter",
            "Acceptance by drafter",
            "each drafter of the policy earns its place.",
            "take one that stays below 20 % out of the policy's `drafters`.",
        ),
        accepted_by(
            "prompt_bucket",
            "Acceptance by tokens of the prompt",
            "longer prompts do better with lookups.",
            "where only short prompts fail, set `match.prompt_tokens` of the policy.",
        ),
        accepted_by(
            "policy",
            "Acceptance by policy",
            "above 40 %.",
            "give a policy that stays low other drafters, or the mode `ride`.",
        ),
    )


def size() -> tuple[Panel, ...]:
    """The row “How long, how fast”."""
    return (
        heatmap(
            "Draft tokens of a round",
            "short",
            Query(increase("foretell_gamma_bucket", by="le", over="$__rate_interval")),
            width=12,
            says=(
                "Rounds by the number of draft tokens sent (γ), over time; a cell is the number of rounds between two"
                " bounds."
            ),
            good="dark where acceptance still pays.",
            otherwise="all at `gamma.max`: raise it. All at 0 or 1: drafts are rarely worth their verification.",
        ),
        lines(
            "Draft tokens of a round, mean",
            "none",
            Query(ratio(rate("foretell_gamma_sum"), rate("foretell_gamma_count")), "drafted"),
            Query(ratio(rate(ACCEPTED), rate(LEAPS)), "accepted"),
            width=12,
            says="Draft tokens sent in a round and drafted tokens accepted in one, means.",
            good="the two lines are close.",
            otherwise="far apart: raise `gamma.margin` or lower `gamma.max`.",
        ),
        lines(
            "Time to draft and to verify",
            "s",
            *(
                Query(quantile(rank, f"foretell_leap_{part}_seconds"), f"{part} {name}")
                for part in ("draft", "verify")
                for rank, name in ((0.5, "p50"), (0.95, "p95"))
            ),
            width=12,
            says="Time to draft for a round, and of its verify call.",
            good="drafting is far below verifying.",
            otherwise=(
                "drafting as long as verifying: take a smaller draft model or give it a device of its own. Long "
                "verify calls: the engine is loaded."
            ),
        ),
        lines(
            "Calls ahead",
            "cps",
            Query(rate("foretell_leap_ahead_total", by="result"), "{{result}}"),
            width=12,
            says="Verify calls sent before the call was answered that they rest on: used, or dropped unread.",
            good="more `used` than `dropped`.",
            otherwise="more `dropped`: they cost the engine for nothing; the budget limits them.",
        ),
    )


def model() -> tuple[Panel, ...]:
    """The row “Model drafters, lossy rules and memory”."""
    return (
        lines(
            "Questions to model drafters",
            "cps",
            Query(rate("foretell_drafts_total", by="kind"), "{{kind}}"),
            absent="no model drafter",
            says="Questions per second: a `draft`, one `sampled` from their law, or a `shadow` draft.",
            good="follows the rounds of policies with a model drafter.",
            otherwise="none: no policy names the model, or its vocabulary does not fit.",
        ),
        lines(
            "Drafts lost",
            "cps",
            Query(rate("foretell_drafts_lost_total", by="cause"), "{{cause}}"),
            absent="no model drafter",
            says="Questions to model drafters per second without an answer, or with one that came too late.",
            good="none.",
            otherwise=(
                "`patience`, `timeout`: the drafter is too slow. `no_seat`: raise its `slots`. `fault`: the log says "
                "which."
            ),
        ),
        lines(
            "Questions that wait for a drafter",
            "short",
            Query(f"max by (drafter) ({of('foretell_drafter_queue')})", "{{drafter}}"),
            absent="no model drafter",
            says="Questions in the queue of each model drafter.",
            good="0 most of the time.",
            otherwise="always some: give it a GPU (`device`), or use it in fewer policies.",
        ),
        lines(
            "Places under a lossy rule",
            "cps",
            Query(rate("foretell_drift_places_total", by="outcome"), "{{outcome}}"),
            Query(rate("foretell_drift_substitutions_total"), "substituted"),
            absent="exact rules only",
            says=(
                "Places per second with a draft token under a lossy rule: relaxed, exact because probabilities are "
                "`unknown`, or because a limit of drift is reached; and tokens that the target had not chosen."
            ),
            good="absent, unless you chose a lossy rule.",
            otherwise=(
                "`unknown`: the engine gives too few log-probabilities. `limited`: `max_drift` or `max_drift_rate` is"
                " reached."
            ),
        ),
        lines(
            "What is remembered",
            "short",
            Query(f"sum({of('foretell_remembered_texts')})", "texts"),
            Query(f"sum({of('foretell_remembered_tokens')})", "tokens"),
            Query(f"sum({of('foretell_remembered_successors')})", "successors"),
            Query(f"sum({of('foretell_remembered_bytes')})", "bytes"),
            overrides=(axis_right("bytes", "bytes"),),
            absent="no memory",
            says=(
                "Earlier texts, their tokens, and tokens whose likely successors are remembered, for drafters to look"
                " up; bytes at the right."
            ),
            good="grows, then stays at `memory.bytes`.",
            otherwise="0 although a policy has `suffix`: its `scope` has no tenant to remember for.",
        ),
        lines(
            "Texts learnt and forgotten",
            "cps",
            Query(rate("foretell_remembered_texts_total", by="event"), "{{event}}"),
            absent="no memory",
            says=(
                "Texts per second that were learnt, known already, evicted for room, expired, or dropped because too "
                "many came."
            ),
            good="no `dropped`, few `evicted`.",
            otherwise=(
                "much `evicted`: raise `memory.bytes`. `dropped`: more texts end than can be learnt; it costs "
                "acceptance only."
            ),
        ),
    )


def board() -> Dashboard:
    """The dashboard."""
    return Dashboard(
        "drafts",
        "how good are the drafts?",
        "What is accepted, by place in the draft, drafter, prompt and policy; how long drafts are, what "
        "they cost, and what is remembered.",
        (
            ("In short", short()),
            ("Where they are good", where()),
            ("How long, how fast", size()),
            ("Model drafters, lossy rules and memory", model()),
        ),
    )
