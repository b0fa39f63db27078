"""Why did it not speculate? Reasons of requests, gates, probes, and the load that the gates go by."""

from .panels import Dashboard, Panel, Query, lines, stat, timeline
from .promql import increase, of, rate, share

RIDES, BYPASS, GATE, LOAD = (
    "foretell_rides_total",
    "foretell_bypass_total",
    "foretell_gate_open",
    "foretell_replica_load",
)
MODE = "foretell_mode"
RUNNING_OR_WAITING, KV = 'signal=~"running|waiting"', 'signal="kv"'
NOT_ONE = ((None, "green"), (1, "red"))
MODES = {0: ("off", "red"), 1: ("observe", "yellow"), 2: ("auto", "green")}
OPEN = {0: ("closed", "red"), 1: ("open", "green")}


def mode_number() -> str:
    """0 off, 1 observe, 2 auto; of several processes the strictest."""
    auto, observe = of(MODE, 'mode="auto"'), of(MODE, 'mode="observe"')
    return f"min by (backend) (2 * {auto} + ignoring (mode) {observe})"


def state() -> tuple[Panel, ...]:
    """The row “Now”."""
    return (
        stat(
            "Mode",
            "none",
            Query(mode_number(), "{{backend}}"),
            states=MODES,
            absent="not scraped",
            width=6,
            says="The mode in force at each backend; of several processes the strictest.",
            good="`auto`, once `observe` has shown a gain.",
            otherwise="in `off` and `observe` nothing is speculated: set it on the status page or by `POST /api/mode`.",
        ),
        stat(
            "Gates closed now",
            "none",
            Query(f"count({of(GATE)} == 0) or 0 * count({of(GATE)})"),
            steps=((None, "green"), (1, "yellow")),
            absent="no gates yet",
            width=6,
            says="How many gates are closed, over policies, replicas and processes.",
            good="0; at peaks of load some are closed, and that is what they are for.",
            otherwise="see which in the timeline below, and the panel of its signal.",
        ),
        stat(
            "Token ids in doubt",
            "none",
            Query(increase("foretell_shadow_mismatch_total", by="field"), "{{field}}"),
            steps=NOT_ONE,
            width=6,
            says=(
                "Requests within the time shown whose token ids were found in doubt, so that they ride to the end: "
                "ids of the prompt, or of the output."
            ),
            good="0, or a few in thousands.",
            otherwise=(
                "many: the tokenizer that Foretell has is not the engine's; see `tokenizer` of the backend in the "
                "process file and `foretell check`."
            ),
        ),
        stat(
            "Tokenizer mismatch",
            "none",
            Query(f"max by (drafter) ({of('foretell_tokenizer_mismatch')})", "{{drafter}}"),
            states={0: ("none", "green"), 1: ("mismatch", "red")},
            absent="no model drafter",
            width=6,
            says=(
                "Whether a model drafter that is declared to share the target's vocabulary does not; it does not "
                "draft then."
            ),
            good="none.",
            otherwise="set `vocabulary` of the drafter to `auto`, or export a drafter with the target's tokenizer.",
        ),
    )


def reasons() -> tuple[Panel, ...]:
    """The row “Reasons”."""
    return (
        lines(
            "Eligible requests that rode",
            "reqps",
            Query(f"{rate(RIDES, by='reason')} > 0", "{{reason}}"),
            stack=True,
            width=12,
            height=10,
            says="Requests per second that could have leapt and did not, or not to their end, by reason.",
            good="little but `holdback`, `switchback` and `no_gain`.",
            otherwise=(
                "`gate_*`: the timeline below; `gate_latency` while its gate is open: a draft would keep the client waiting "
                "for longer than `gates.max_gap`. `no_gain`, `no_draft`: “how good are the drafts?”. `observe`, "
                "`shadow`, `policy`: the mode or the policy says so. `budget`: raise `budget.extra_tokens` if the "
                "engine has room. `backend_speculates`: the engine does it itself."
            ),
        ),
        lines(
            "Requests that may not leap",
            "reqps",
            Query(f"{rate(BYPASS, by='reason')} > 0", "{{reason}}"),
            stack=True,
            width=12,
            height=10,
            says="Requests per second that never leap, by reason.",
            good="only what your clients really ask for: `tools`, `structured`, `multimodal`.",
            otherwise=(
                "`no_policy`: no policy matches. `parameter`, `unknown_parameter`, `defaults_unknown`: the guarantees"
                " page names the parameters. `tokenizer`, `no_plan`, `unreachable`, `balanced`: Foretell cannot "
                "verify at this backend; run `foretell probe`. `memory`, `sessions`: raise `limits`."
            ),
        ),
        lines(
            "Share of requests by path",
            "percentunit",
            Query(share("foretell_requests_total", "path"), "{{path}}"),
            stack=True,
            width=12,
            defaults={"min": 0, "max": 1},
            says="How requests were served.",
            good="most are `speculated` once the mode is `auto`.",
            otherwise="the two panels above name the reasons.",
        ),
        timeline(
            "Mode over time",
            Query(mode_number(), "{{backend}}"),
            states=MODES,
            absent="not scraped",
            width=12,
            says="The mode in force at each backend; of several processes the strictest.",
            good="`auto`, and changes only where an operator made them.",
            otherwise=(
                "a change that nobody remembers: the log says who asked for it; modes set with a `ttl` return by "
                "themselves."
            ),
        ),
    )


def gates() -> tuple[Panel, ...]:
    """The row “Gates”."""
    return (
        timeline(
            "Gates",
            Query(f"min by (policy, replica, gate) ({of(GATE)})", "{{policy}} {{replica}} {{gate}}"),
            states=OPEN,
            absent="no gates yet",
            width=24,
            height=12,
            says="Live reasons not to leap, for each policy and replica; closed where it is closed in any process.",
            good="open (green).",
            otherwise=(
                "`load`: the engine has requests waiting or its cache is full; leaping returns by itself. `stale`: "
                "its metrics cannot be read. `acceptance`: drafts are bad. `latency`: the control group was faster. "
                "`memory`: Foretell's own. `health`: the replica fails."
            ),
        ),
        lines(
            "Gate transitions",
            "cps",
            Query(rate("foretell_gate_transitions_total", by="gate, to"), "{{gate}} {{to}}"),
            width=12,
            absent="not scraped",
            says="Changes of gates per second, looked for every second.",
            good="rare.",
            otherwise=(
                "many a minute: a signal swings about its threshold; raise `gates.waiting` or `gates.kv`, or lengthen"
                " `gates.reprobe`."
            ),
        ),
        lines(
            "Probes",
            "short",
            Query(
                increase("foretell_probe_total", by="replica, result", over="$__rate_interval"),
                "{{replica}} {{result}}",
            ),
            width=12,
            absent="no probe",
            says=(
                "Measurements of a replica's verify calls that ended: they pay, nothing pays (`pays_not`), or several"
                " engines answer (`balanced`)."
            ),
            good="one `pays` for each replica after its start.",
            otherwise=(
                "`pays_not`: see the sizing page. `balanced`: name the engines one by one, or by headless DNS, "
                "instead of a load balancer."
            ),
        ),
    )


def load() -> tuple[Panel, ...]:
    """The row “Load of the engines”."""
    return (
        lines(
            "Requests at the engine",
            "short",
            Query(f"max by (replica, signal) ({of(LOAD, RUNNING_OR_WAITING)})", "{{replica}} {{signal}}"),
            absent="no load signal",
            says="What the engine says: requests running and waiting.",
            good="`waiting` at 0: the default gate closes above it.",
            otherwise="where some always wait, the engine is full and speculation cannot help; add replicas.",
        ),
        lines(
            "Engine's cache in use",
            "percentunit",
            Query(f"max by (replica) ({of(LOAD, KV)})", "{{replica}}"),
            steps=((None, "green"), (0.9, "red")),
            absent="no load signal",
            defaults={"min": 0, "max": 1},
            says="Share of the engine's KV cache in use.",
            good="below 90 %: the default gate closes above it.",
            otherwise="always above: the engine is at its limit; add replicas or shorten contexts.",
        ),
        lines(
            "Age of the load signal",
            "s",
            Query(f"max by (replica) ({of('foretell_replica_load_age_seconds')})", "{{replica}}"),
            steps=((None, "green"), (2, "red")),
            absent="no load signal",
            says="How long ago the engine told its load.",
            good="below 2 s: the default gate `stale` closes above it.",
            otherwise="the engine's metrics page is slow or cannot be read: check `load.url` of the backend.",
        ),
    )


def board() -> Dashboard:
    """The dashboard."""
    return Dashboard(
        "why",
        "why did it not speculate?",
        "Reasons of requests that did not leap, gates and modes over time, and the signals that the gates go by.",
        (("Now", state()), ("Reasons", reasons()), ("Gates", gates()), ("Load of the engines", load())),
    )
