"""Is the proxy healthy? Traffic, errors, own work, replicas, configuration and resources."""

from .panels import NONE, YES, Dashboard, Panel, Query, axis_right, lines, names, stat, timeline
from .promql import grouped, increase, of, quantile, rate, ratio

REQUESTS, OVERHEAD = "foretell_requests_total", "foretell_overhead_seconds"
ERRORS = ((None, "green"), (0.001, "yellow"), (0.01, "red"))
FILLED = ((None, "green"), (0.8, "yellow"), (0.95, "red"))
SHARE = {"min": 0, "max": 1}
BREAKER = {0: ("closed", "green"), 1: ("half open", "yellow"), 2: ("open", "red")}
DRAINS = {0: ("serving", "green"), 1: ("drains", "yellow")}
FAILED = 'code_class="5xx"'


def full(used: str, limit: str) -> str:
    """Share of a limit that is in use, by process."""
    return ratio(of(used), of(limit))


def now() -> tuple[Panel, ...]:
    """The row “Now”."""
    failed = f"({rate(REQUESTS, FAILED)} or vector(0))"
    return (
        stat(
            "Requests",
            "reqps",
            Query(rate(REQUESTS)),
            says="Finished requests per second.",
            good="follows your traffic.",
            otherwise="0 despite traffic: the Service does not point at Foretell, or it drains.",
        ),
        stat(
            "Server errors",
            "percentunit",
            Query(ratio(failed, rate(REQUESTS))),
            steps=ERRORS,
            says=(
                "Share of requests that were answered with a status of 500 or above, the engine's own included. "
                "Errors after the head of an answer was sent are not included: they are counted as broken answers."
            ),
            good="below 0.1 % (green).",
            otherwise=(
                "above 1 % (red): see errors by replica and kind; the engine's own errors show there as `server_error`."
            ),
        ),
        stat(
            "Broken answers",
            "none",
            Query(increase("foretell_broken_answers_total")),
            steps=((None, "green"), (1, "red")),
            says=(
                "Answers within the time range that broke off after their head was sent, for a fault that was not the "
                "client's."
            ),
            good="0.",
            otherwise="see errors by replica and kind; a typical cause is an engine that was stopped without draining.",
        ),
        stat(
            "Configuration",
            "none",
            Query(f"min({of('foretell_config_synchronized')})"),
            steps=YES,
            states={0: ("refused", "red"), 1: ("in force", "green")},
            absent="not scraped",
            says="`in force` if every process uses the configuration of its files.",
            good="in force.",
            otherwise="a file has an error and the last good set stays in force: `foretell check` prints all errors.",
        ),
        stat(
            "Since the last good configuration",
            "s",
            Query(f"time() - max({of('foretell_config_last_success_timestamp_seconds')})"),
            absent="not scraped",
            says="Time since a configuration was last loaded, by the most recent process.",
            good="the time since your last change.",
            otherwise="longer: the change has not reached the files that Foretell reads.",
        ),
        timeline(
            "Drain",
            Query(f"max by (instance) ({of('foretell_draining')})", "{{instance}}"),
            states=DRAINS,
            absent="not scraped",
            width=4,
            height=5,
            says="Processes that drain: they finish their requests and accept no new ones.",
            good="serving, except during rollouts.",
            otherwise="drains for longer than `drain.grace`: see requests in flight.",
        ),
    )


def traffic() -> tuple[Panel, ...]:
    """The row “Traffic”."""
    failed = f"({rate(REQUESTS, FAILED)} or vector(0))"
    return (
        lines(
            "Requests by class of status",
            "reqps",
            Query(rate(REQUESTS, by="code_class"), "{{code_class}}"),
            stack=True,
            says="Finished requests per second, by class of the status that clients got.",
            good="nearly all `2xx`.",
            otherwise="`4xx`: clients' requests, or limits of Foretell (see refused). `5xx`: see errors by kind.",
        ),
        lines(
            "Share of server errors",
            "percentunit",
            Query(ratio(failed, rate(REQUESTS)), "5xx"),
            Query(ratio(rate("foretell_broken_answers_total"), rate(REQUESTS)), "broken answers"),
            steps=ERRORS,
            defaults={"min": 0},
            says=(
                "Share of requests answered with 5xx, and of answers that broke off after their head was sent, which "
                "have a good status and are counted separately. The lines are at 0.1 % and 1 %."
            ),
            good="below 0.1 %.",
            otherwise="above 1 %: see errors by replica and kind.",
        ),
        lines(
            "In flight",
            "short",
            Query(f"sum({of('foretell_requests_in_flight')})", "requests"),
            Query(f"sum({of('foretell_streams_in_flight')})", "streams"),
            says="Requests being answered, and event streams being sent.",
            good="follows the traffic.",
            otherwise="rises without limit: engines do not answer; see their load and `timeouts`.",
        ),
        lines(
            "Connections",
            "short",
            Query(f"sum({of('foretell_connections')})", "connected"),
            Query(f"sum({of('foretell_connections_limit')})", "limit"),
            Query(rate("foretell_connections_evicted_total"), "evicted per second"),
            Query(rate("foretell_connections_failed_total"), "failed per second"),
            overrides=(axis_right(".*per second", "cps"),),
            says=(
                "Connected clients, and their limit; on the right axis idle connections that were closed because "
                "others waited, and connections that could not be accepted."
            ),
            good="far below the limit, none failed.",
            otherwise=(
                "near the limit: raise `limits.connections` or the limit of file descriptors. Failed: the process has "
                "no file descriptors left."
            ),
        ),
        lines(
            "Clients that left, requests refused",
            "reqps",
            Query(rate("foretell_client_disconnects_total"), "left"),
            Query(rate("foretell_requests_refused_total", by="code"), "refused: {{code}}"),
            says="Clients per second that left before the end of their answer, and requests with a refused head.",
            good="few.",
            otherwise="many left: answers exceed the clients' timeouts. Refused: the code shows which limit.",
        ),
    )


def own() -> tuple[Panel, ...]:
    """The row “Own work”."""
    return (
        *(
            lines(
                f"Own work, {name}",
                "s",
                Query(quantile(rank, OVERHEAD, by="stage"), "{{stage}}"),
                steps=((None, "green"), (0.001, "red")),
                says=(
                    f"Duration of Foretell's own work by stage, {name}; the line is at 1 ms, above which an alert rule "
                    f"fires for p99."
                ),
                good="below 1 ms.",
                otherwise=(
                    "`parse`: very long bodies. `draft`: long contexts with many lookups. All stages: too little CPU; "
                    "see busy threads."
                ),
            )
            for rank, name in ((0.5, "p50"), (0.99, "p99"))
        ),
        lines(
            "Added time to the first token",
            "s",
            *(
                Query(quantile(rank, "foretell_added_ttft_seconds"), name)
                for rank, name in ((0.5, "p50"), (0.99, "p99"))
            ),
            steps=((None, "green"), (0.01, "red")),
            says="Time that Foretell adds to the time to the first token. The line is at 10 ms.",
            good="a few milliseconds, including the requests that a session makes first.",
            otherwise="above 10 ms: see own work, and the time to connect to replicas.",
        ),
        lines(
            "Busy share of the network threads",
            "percentunit",
            Query(
                ratio(
                    rate("foretell_runtime_busy_seconds_total", by="instance"),
                    grouped("sum", "instance", of("foretell_runtime_workers")),
                ),
                "{{instance}}",
            ),
            steps=FILLED,
            defaults=SHARE,
            absent="not scraped",
            says="Share of time that the network threads of a process were busy.",
            good="below 80 %.",
            otherwise="above: give it more CPU or more replicas of Foretell.",
        ),
        lines(
            "CPU cores in use",
            "none",
            Query(rate("process_cpu_seconds_total", by="instance"), "{{instance}}"),
            absent="not scraped",
            defaults={"min": 0},
            says="Cores in use by each process, model drafters on the CPU included.",
            good="below its request in the cluster.",
            otherwise="at its limit: raise it; throttling shows as added time to the first token.",
        ),
        lines(
            "Log lines and spans dropped",
            "cps",
            Query(rate("foretell_log_dropped_total"), "log lines"),
            Query(rate("foretell_spans_dropped_total"), "spans"),
            absent="not scraped",
            steps=NONE,
            says=(
                "Log lines that were dropped because too many waited or they could not be written, and spans that "
                "found no room in the queue or that the collector did not take."
            ),
            good="0.",
            otherwise="log: its reader is too slow; sample it. Spans: the collector of `observe.otlp` is slow or down.",
        ),
    )


def replicas() -> tuple[Panel, ...]:
    """The row “Replicas”."""
    return (
        timeline(
            "Breakers",
            Query(f"max by (replica) ({of('foretell_replica_breaker_state')})", "{{replica}}"),
            states=BREAKER,
            absent="no replica",
            width=12,
            says="State of each replica's breaker; the worst over processes.",
            good="closed.",
            otherwise="open: requests go to other replicas. See its last error on the status page.",
        ),
        timeline(
            "Reached",
            Query(f"min by (replica) ({of('foretell_replica_up')})", "{{replica}}"),
            states={0: ("not reached", "red"), 1: ("reached", "green")},
            absent="no replica",
            width=12,
            says="`reached` if the last request, or health check, reached the replica, and it answers.",
            good="reached.",
            otherwise="check the engine, and the network in between; `silent` on the status page: the engine hangs.",
        ),
        lines(
            "Requests to replicas",
            "reqps",
            Query(rate("foretell_replica_requests_total", by="replica"), "{{replica}}"),
            absent="no replica",
            says="Requests per second, Foretell's own included.",
            good="distributed like the traffic.",
            otherwise="one replica gets none: its breaker is open, or it is disabled.",
        ),
        lines(
            "In flight by replica",
            "short",
            Query(f"sum by (replica) ({of('foretell_replica_requests_in_flight')})", "{{replica}}"),
            absent="no replica",
            says="Requests in flight at each replica.",
            good="follows the traffic.",
            otherwise="rises at one replica only: that engine is slow.",
        ),
        lines(
            "Breaker transitions",
            "cps",
            Query(rate("foretell_replica_breaker_transitions_total", by="replica, to"), "{{replica}} {{to}}"),
            absent="no replica",
            says="Transitions of breakers per second.",
            good="none.",
            otherwise="repeated: the replica answers its health check and fails requests.",
        ),
        lines(
            "Errors by kind",
            "cps",
            Query(rate("foretell_replica_errors_total", by="replica, kind"), "{{replica}} {{kind}}"),
            absent="no replica",
            says="Requests per second without a complete answer, or with a server error that they did not cause.",
            good="none.",
            otherwise=(
                "`backend_unreachable`: address or network. `backend_timeout`: see `timeouts`. `backend_closed`: the "
                "engine has exited. `server_error`: see its own log."
            ),
        ),
        lines(
            "Retries",
            "reqps",
            Query(rate("foretell_replica_retries_total", by="replica, result"), "{{replica}} {{result}}"),
            absent="no replica",
            says=(
                "Requests per second that got no byte from a replica and were `sent` again, or were not because the "
                "retry budget is empty (`no_budget`)."
            ),
            good="none.",
            otherwise="`no_budget`: too many requests fail to be retried; fix the replicas.",
        ),
        lines(
            "Time to connect",
            "s",
            *(
                Query(quantile(rank, "foretell_replica_connect_seconds", by="replica"), f"{{{{replica}}}} {name}")
                for rank, name in ((0.5, "p50"), (0.99, "p99"))
            ),
            absent="no new connection",
            says="Time to connect to a replica, TLS included.",
            good="about one round trip, two or three with TLS.",
            otherwise="long: the network, or an engine whose accept queue is full.",
        ),
    )


def resources() -> tuple[Panel, ...]:
    """The row “Resources and configuration”."""
    return (
        lines(
            "Memory for bodies and sessions",
            "percentunit",
            Query(full("foretell_memory_bytes", "foretell_memory_limit_bytes"), "{{instance}}"),
            steps=FILLED,
            defaults={"min": 0},
            absent="not scraped",
            says=(
                "Share of `limits.memory` in use. At 100 % completions are passed through unread, at 200 % answered with 503."
            ),
            good="below 80 %.",
            otherwise="raise `limits.memory`, or add replicas of Foretell.",
        ),
        lines(
            "Resident memory",
            "bytes",
            Query(of("process_resident_memory_bytes"), "{{instance}} resident"),
            Query(of("foretell_memory_limit_bytes"), "{{instance}} limits.memory"),
            absent="not scraped",
            says=(
                "Resident memory of the process, model drafters included, and `limits.memory`, the limit for bodies "
                "and sessions."
            ),
            good="constant after the first hour.",
            otherwise=(
                "rises for days at steady traffic: report it as a bug. An alert rule fires at 80 % of `limits.memory` "
                "in use by bodies and sessions."
            ),
        ),
        lines(
            "File descriptors",
            "percentunit",
            Query(full("process_open_fds", "process_max_fds"), "{{instance}}"),
            steps=FILLED,
            defaults=SHARE,
            absent="not scraped",
            says="Open file descriptors as a share of their limit.",
            good="below 80 %.",
            otherwise="raise the limit of file descriptors (`LimitNOFILE`), or lower `limits.connections`.",
        ),
        lines(
            "Threads",
            "short",
            Query(of("process_threads"), "{{instance}}"),
            absent="not scraped",
            width=6,
            says="Threads of each process.",
            good="constant.",
            otherwise="rises without limit: report it as a bug.",
        ),
        lines(
            "Reloads",
            "short",
            Query(increase("foretell_config_reloads_total", by="result", over="$__rate_interval"), "{{result}}"),
            absent="not scraped",
            width=6,
            says="Reloads of the configuration within an interval.",
            good="only your changes, all `success`.",
            otherwise="`failure`: the former configuration stays in force; `foretell check` prints all errors.",
        ),
        stat(
            "Up for",
            "s",
            Query(f"time() - min({of('process_start_time_seconds')})"),
            absent="not scraped",
            says="Time since the oldest process started.",
            good="since the last rollout.",
            otherwise="short without a rollout: it was restarted; see the log of the previous process.",
        ),
        names(
            "Version",
            "version",
            Query(f"count by (version) ({of('foretell_build_info')})"),
            absent="not scraped",
            width=4,
            says="Versions of the processes.",
            good="one, except during rollouts.",
            otherwise="two for a long time: a rollout is stuck.",
        ),
        names(
            "Configuration in force",
            "version",
            Query(f"count by (version) ({of('foretell_config_info')})"),
            absent="not scraped",
            width=4,
            says="Hashes of the configurations in force.",
            good="one, except during rollouts.",
            otherwise="two for a long time: a process has not loaded the files; check that it is synchronized.",
        ),
    )


def store() -> tuple[Panel, ...]:
    """The row “Fleet store”."""
    return (
        timeline(
            "Store",
            Query(f"min by (instance) ({of('foretell_store_up')})", "{{instance}}"),
            states={0: ("not exchanged", "red"), 1: ("exchanged", "green")},
            absent="no fleet.store",
            width=8,
            says="`exchanged` if the last exchange with the store succeeded.",
            good="exchanged.",
            otherwise="the sidecar goes on with what it has; see “Failed exchanges”.",
        ),
        lines(
            "Age of others' measurements",
            "s",
            Query(f"max by (instance) ({of('foretell_store_age_seconds')})", "{{instance}}"),
            absent="no fleet.store",
            width=8,
            says="Time since the measurements of other sidecars were last read.",
            good="at most twice `fleet.sync`.",
            otherwise="rises: the store is not reached, or refuses.",
        ),
        lines(
            "Failed exchanges",
            "short",
            Query(increase("foretell_store_errors_total", by="kind", over="$__rate_interval"), "{{kind}}"),
            absent="no fleet.store",
            width=8,
            says="Exchanges with the store that failed, by kind.",
            good="none.",
            otherwise="`connect`, `timeout`: the server or the network; `password`: the login; `full`: its memory; `version`: "
            "sidecars of another version of Foretell.",
        ),
    )


def board() -> Dashboard:
    """The dashboard."""
    return Dashboard(
        "health",
        "is the proxy healthy?",
        "Traffic, errors, own work, replicas, configuration and resources.",
        (
            ("Now", now()),
            ("Traffic", traffic()),
            ("Own work", own()),
            ("Replicas", replicas()),
            ("Resources and configuration", resources()),
            ("Fleet store", store()),
        ),
    )
