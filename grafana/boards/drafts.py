"""How good are the drafts? Acceptance by position, drafter, prompt and policy, and the cost of drafting."""

from .panels import NONE, Dashboard, Panel, Query, axis_right, bars, heatmap, lines, stat
from .promql import increase, of, quantile, rate, ratio

ACCEPTED, DRAFTED, ROUNDS = (
    "foretell_spec_decode_num_accepted_tokens_total",
    "foretell_spec_decode_num_draft_tokens_total",
    "foretell_spec_decode_num_drafts_total",
)
AT_POSITION, REACHED = (
    "foretell_spec_decode_num_accepted_tokens_per_pos_total",
    "foretell_spec_decode_num_draft_tokens_per_pos_total",
)
ACCEPTANCE = ((None, "red"), (0.2, "yellow"), (0.4, "green"))
SHARE = {"min": 0, "max": 1}
STEPS = "foretell_inject_steps_total"
FEW = 'position=~"0|1|3|7|15|31"'
RANGES = "temperature, load"


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
            "Drafted tokens that became output ÷ drafted tokens. Colours change at 20 % (acceptance gate of the "
            "default policy) and 40 %."
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
            width=8,
            says="Drafted tokens that became output ÷ drafted tokens.",
            good="above 40 % (green).",
            otherwise=(
                "below 20 % (red) the acceptance gate of the default policy closes: find the drafter, prompt or policy "
                "below."
            ),
        ),
        stat(
            "Mean acceptance length",
            "none",
            Query(f"1 + {ratio(rate(ACCEPTED), rate(ROUNDS))}"),
            defaults={"decimals": 2},
            steps=((None, "red"), (1.2, "yellow"), (1.5, "green")),
            width=8,
            says="Mean tokens per round: 1 + accepted tokens ÷ rounds that decided a token.",
            good="above 1.5 (green).",
            otherwise="near 1 (red) drafts have no effect.",
        ),
        stat(
            "Drift, total variation",
            "none",
            Query(increase("foretell_drift_tv_total", by="policy"), "{{policy}}"),
            steps=NONE,
            width=8,
            absent="exact rules only",
            says=(
                "Drift of outputs within the time range, in total variation. Its mean per output bounds the distance of "
                "their distribution from the target's."
            ),
            good="0 with the exact rule.",
            otherwise=(
                "expected if a policy has a lossy rule, up to its `drift_per_100_tokens`; otherwise report it as a bug."
            ),
        ),
    )


def where() -> tuple[Panel, ...]:
    """The row “Acceptance”."""
    return (
        bars(
            "Acceptance by position in the draft",
            "percentunit",
            "position",
            Query(ratio(increase(AT_POSITION, by="position"), increase(REACHED, by="position"))),
            width=12,
            defaults=SHARE,
            says="Of the rounds within the time range whose draft reached a position, the share that accepted it.",
            good="falls slowly from left to right.",
            otherwise=(
                "a steep drop after a few positions: lower `gamma.max` to that position. Low at position 0: the "
                "drafter does not fit the target."
            ),
        ),
        lines(
            "Acceptance by position over time",
            "percentunit",
            Query(
                ratio(rate(AT_POSITION, FEW, by="position"), rate(REACHED, FEW, by="position")), "position {{position}}"
            ),
            width=12,
            defaults=SHARE,
            says="Of the rounds whose draft reached a position (0, 1, 3, 7, 15, 31), the share that accepted it.",
            good="steady.",
            otherwise=(
                "all positions drop at once: a change of model, prompt template or traffic; compare with the "
                "annotations."
            ),
        ),
        accepted_by(
            "drafter",
            "Acceptance by drafter",
            "above 20 % for each drafter of the policy.",
            "remove a drafter that stays below 20 % from the policy's `drafters`.",
        ),
        accepted_by(
            "prompt_bucket",
            "Acceptance by tokens of the prompt",
            "longer prompts are better for lookups.",
            "only short prompts are low: set `match.prompt_tokens` of the policy.",
        ),
        accepted_by(
            "policy",
            "Acceptance by policy",
            "above 40 %.",
            "for a policy that stays low use other drafters, or `mode: plain`.",
        ),
    )


def size() -> tuple[Panel, ...]:
    """The row “Length and duration”."""
    return (
        heatmap(
            "Draft tokens of a round",
            "short",
            Query(increase("foretell_gamma_bucket", by="le", over="$__rate_interval")),
            width=12,
            says=(
                "Rounds by number of draft tokens sent (gamma), over time; a cell is the number of rounds between two "
                "bounds."
            ),
            good="dark where acceptance is still high.",
            otherwise="all at `gamma.max`: raise it. All at 0 or 1: drafts are rarely worth their verification.",
        ),
        lines(
            "Draft tokens of a round, mean",
            "none",
            Query(ratio(rate("foretell_gamma_sum"), rate("foretell_gamma_count")), "drafted"),
            Query(ratio(rate(ACCEPTED), rate(ROUNDS)), "accepted"),
            width=12,
            says="Mean draft tokens sent in a round, and mean draft tokens accepted.",
            good="the two lines are close.",
            otherwise="far apart: raise `gamma.margin` or lower `gamma.max`.",
        ),
        lines(
            "Draft tokens of a round by temperature and load",
            "none",
            Query(
                ratio(rate("foretell_gamma_sum", by=RANGES), rate("foretell_gamma_count", by=RANGES)),
                "T {{temperature}}, load {{load}}",
            ),
            width=12,
            says=(
                "Mean draft tokens sent in a round (gamma), by range of the request's temperature and of the engine's "
                "load (0 idle, 1 full or waiting)."
            ),
            good="falls as temperature and load rise.",
            otherwise="long drafts at high load: lower `gamma.max` or `gates.first_token`.",
        ),
        lines(
            "Accepted draft tokens of a round by temperature and load",
            "none",
            Query(
                ratio(rate("foretell_accepted_sum", by=RANGES), rate("foretell_accepted_count", by=RANGES)),
                "T {{temperature}}, load {{load}}",
            ),
            width=12,
            says="Mean draft tokens accepted in a round, by the same ranges.",
            good="falls as temperature rises, and does not depend on the load.",
            otherwise="near 0 at a temperature: drafts do not pay there, and requests stay plain after a while.",
        ),
        lines(
            "Tolerance and load",
            "percentunit",
            Query("max by (policy) (foretell_tolerance)", "tolerance of {{policy}}"),
            Query("max by (backend) (foretell_load)", "load of {{backend}}"),
            width=12,
            says=(
                "Tolerance of the acceptance rule (0 exact, 1 most) and load of the engine at the last round, by which "
                "the curves of policies are looked up."
            ),
            good="tolerance 0 with the exact rule.",
            otherwise="a tolerance above 0 that you did not want: set `accept: { rule: exact }` in the policy.",
        ),
        lines(
            "Time to draft and to verify",
            "s",
            *(
                Query(quantile(rank, f"foretell_{part}_seconds"), f"{part} {name}")
                for part in ("draft", "verify")
                for rank, name in ((0.5, "p50"), (0.95, "p95"))
            ),
            width=12,
            says="Time to draft for a round, and duration of its verify request.",
            good="drafting is far below verifying.",
            otherwise=(
                "drafting as long as verifying: use a smaller draft model or a device of its own. Long verify "
                "requests: the engine is loaded."
            ),
        ),
    )


def inside() -> tuple[Panel, ...]:
    """The row “Inside the engine's steps”."""
    answered = rate(STEPS, 'result!="skipped"')
    return (
        lines(
            "Steps by drafts",
            "cps",
            Query(rate(STEPS, by="result"), "{{result}}"),
            stack=True,
            absent="no engine connected",
            width=12,
            says=(
                "Steps of engines per second: `drafted`, `plain` without a draft, or `skipped` by the plug-in because "
                "nothing was to be drafted or answers had been late."
            ),
            good="mostly `drafted`.",
            otherwise=(
                "`plain`: no drafter finds anything, or drafts cost more than they bring at this load. `skipped`: "
                "policies, the budget, or late answers."
            ),
        ),
        lines(
            "Late answers and wait",
            "percentunit",
            Query(ratio(rate("foretell_inject_late_total"), answered), "late"),
            Query(ratio(rate("foretell_inject_waited_seconds_total"), answered), "wait"),
            overrides=(axis_right("wait", "s"),),
            absent="no engine connected",
            width=12,
            says=(
                "Answers that came after the plug-in's deadline ÷ answers; mean time that a step waited for its "
                "answer, on the right axis."
            ),
            good="below 2 % late; a wait far below the deadline of 1 ms.",
            otherwise="Foretell lacks processors: give it one that the engine does not use.",
        ),
        bars(
            "Acceptance by position in these steps",
            "percentunit",
            "position",
            Query(
                ratio(
                    increase("foretell_inject_accepted_tokens_per_pos_total", by="position"),
                    increase("foretell_inject_draft_tokens_per_pos_total", by="position"),
                )
            ),
            absent="no engine connected",
            width=12,
            defaults=SHARE,
            says=(
                "Of the drafts that engines verified inside their steps and that reached a position, the share that "
                "accepted it."
            ),
            good="falls slowly from left to right.",
            otherwise="low at position 0: find the drafter or policy above.",
        ),
        lines(
            "Time saved and lost in these steps",
            "percentunit",
            Query(rate("foretell_inject_saved_seconds_total"), "saved"),
            Query(rate("foretell_inject_wasted_seconds_total"), "lost"),
            absent="no engine connected",
            width=12,
            says="Seconds per second that drafts saved against steps without drafts, and that they and waiting lost.",
            good="saved is far above lost.",
            otherwise="lost is near saved: lower `gamma.max`, or find the drafter that is not accepted.",
        ),
    )


def model() -> tuple[Panel, ...]:
    """The row “Model drafters, lossy rules and corpus”."""
    return (
        lines(
            "Requests to model drafters",
            "cps",
            Query(rate("foretell_drafts_total", by="kind"), "{{kind}}"),
            absent="no model drafter",
            says="Requests per second: a `draft`, or a `shadow` draft.",
            good="follows the rounds of policies with a model drafter.",
            otherwise="none: no policy names the model, or its vocabulary does not match.",
        ),
        lines(
            "Drafts lost",
            "cps",
            Query(rate("foretell_drafts_lost_total", by="cause"), "{{cause}}"),
            absent="no model drafter",
            says="Requests to model drafters per second without an answer, or with one that came too late.",
            good="none.",
            otherwise=(
                "`patience`, `timeout`: the drafter is too slow. `no_slot`: raise its `slots`. `fault`: see the log."
            ),
        ),
        lines(
            "Requests waiting for a drafter",
            "short",
            Query(f"max by (drafter) ({of('foretell_drafter_queue')})", "{{drafter}}"),
            absent="no model drafter",
            says="Requests in the queue of each model drafter.",
            good="0 most of the time.",
            otherwise="always above 0: give it a GPU (`device`), or use it in fewer policies.",
        ),
        lines(
            "Positions under a lossy rule",
            "cps",
            Query(rate("foretell_drift_positions_total", by="outcome"), "{{outcome}}"),
            Query(rate("foretell_drift_substitutions_total"), "substituted"),
            absent="exact rules only",
            says=(
                "Positions per second with a draft token under a lossy rule: `relaxed`, exact because probabilities "
                "are `unknown`, or exact because a limit of drift is reached (`limited`); and tokens that the target "
                "had not chosen (`substituted`)."
            ),
            good="absent, unless a policy has a lossy rule.",
            otherwise=(
                "`unknown`: the engine returns too few log-probabilities. `limited`: `drift_per_100_tokens` or `max_drift` "
                "is reached."
            ),
        ),
        lines(
            "Size of the corpus",
            "short",
            Query(f"sum({of('foretell_corpus_texts')})", "texts"),
            Query(f"sum({of('foretell_corpus_tokens')})", "tokens"),
            Query(f"sum({of('foretell_corpus_bytes')})", "bytes"),
            overrides=(axis_right("bytes", "bytes"),),
            absent="no corpus",
            says="Earlier texts that drafters look up, and their tokens; bytes on the right axis.",
            good="grows, then stays at `corpus.bytes`.",
            otherwise="0 although a policy has `suffix`: its `scope` is `request`, or requests have no trusted tenant.",
        ),
        lines(
            "Texts added to and removed from the corpus",
            "cps",
            Query(rate("foretell_corpus_texts_total", by="event"), "{{event}}"),
            absent="no corpus",
            says=(
                "Texts per second that were `learnt`, `known` already, `evicted` for room, `expired`, or `dropped` "
                "because too many came."
            ),
            good="no `dropped`, few `evicted`.",
            otherwise=(
                "many `evicted`: raise `corpus.bytes`. `dropped`: more answers end than can be learnt; this costs "
                "acceptance only."
            ),
        ),
    )


def board() -> Dashboard:
    """The dashboard."""
    return Dashboard(
        "drafts",
        "how good are the drafts?",
        "Acceptance by position in the draft, drafter, prompt and policy; length and cost of drafts; the corpus of "
        "earlier texts.",
        (
            ("In short", short()),
            ("Acceptance", where()),
            ("Length and duration", size()),
            ("Inside the engine's steps", inside()),
            ("Model drafters, lossy rules and corpus", model()),
        ),
    )
