#!/usr/bin/env python3
"""Cost of an open status page: requests with the page open against closed, and processor time.

    page.py [--foretell BIN] [--alternations N] [--requests N] [--clients N] [--idle S] [--json F]

One paced target, one `foretell serve` in front of it. Clients send N requests with the page open,
then N with it closed, with the order changing from one alternation to the next; the ratio of the
two medians is taken in each, and the mean of their logarithms has an interval by Student's t. The
page is simulated by its requests: the same paths at the same rate over one connection, from a
separate process; a browser's own work is on another machine.

Then there are no requests for S seconds without the page and for S seconds with it: the difference
of the process's time, from /proc, is the share of one core that the page costs. 50 sessions are in
the list by then, and a quarter of an hour of samples only if the run took that long.

Exits 2 if a request failed, if the upper bound of the ratio is above 1.05, or if the page costs
more than 1 % of one core. Needs the exports of `make -s print-env`.
"""

import argparse
import concurrent.futures
import contextlib
import http.client
import json
import math
import multiprocessing
import os
import pathlib
import statistics
import sys
import time

import paced
import sides

PACE = "step=5ms,base=1.35,node=0.025,prompt=0.1ms"
# As in src/foretell/admin/page/page.js.
EVERY, REPLICAS, POLICIES, COVERAGE = 2.0, 2, 5, 5
RATIO_MOST, SHARE_MOST = 1.05, 0.01
# The 97.5 % point of Student's t, by degrees of freedom.
STUDENT = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 14: 2.145, 19: 2.093}


def look(connection, state):
    """One refresh of the page; `state` is kept from one to the next."""
    def ask(path):
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise sides.Wrong(f"{path}: HTTP {answer.status}")
        return json.loads(body)

    status = ask(f"/api/status?after={state['after']}")
    if status["samples"]:
        state["after"] = status["samples"][-1]["number"]
    if state["looks"] % REPLICAS == 0:
        ask("/api/replicas")
    if state["looks"] % POLICIES == 0:
        ask("/api/policies")
    if state["looks"] % COVERAGE == 0:
        ask("/api/coverage")
    if status["sessions"] != state["sessions"]:
        ask("/api/sessions?rounds=no")
        state["sessions"] = status["sessions"]
    state["looks"] += 1


def keep_looking(admin, over, looks):
    """The page in a separate process, until `over`; `looks` counts the refreshes."""
    state, due = {"after": 0, "looks": 0, "sessions": -1}, time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", admin, timeout=10)
    while not over.is_set():
        try:
            look(connection, state)
        except (http.client.HTTPException, ConnectionError):
            # The server closes connections that are idle between two refreshes; a browser
            # reconnects, too.
            connection.close()
            look(connection, state)
        looks.value = state["looks"]
        due += EVERY
        over.wait(max(0.0, due - time.monotonic()))
    connection.close()


@contextlib.contextmanager
def page_open(admin, is_open=True):
    """Keeps the page open during the block; yields its number of refreshes."""
    looks, over = multiprocessing.Value("i", 0), multiprocessing.Event()
    page = multiprocessing.Process(target=keep_looking, args=(admin, over, looks), daemon=True) if is_open else None
    if page:
        page.start()
    try:
        yield looks
    finally:
        over.set()
        if page:
            page.join()
    if page and page.exitcode:
        raise sides.Wrong("the page's requests failed")


def cpu_seconds(pid):
    """Processor seconds of the process so far, user and system."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def asked(pool, clients, prompts, requests):
    """Seconds of each of `requests` requests, dealt to the clients; failures in words."""
    def one(client, first):
        return [client.ask(prompts[index % len(prompts)]) for index in range(first, requests, len(clients))]

    answers = [answer for part in pool.map(one, clients, range(len(clients))) for answer in part]
    return [answer["seconds"] for answer in answers if "failed" not in answer], [a["failed"] for a in answers if "failed" in a]


def interval(ratios):
    """Geometric mean of ratios and its 95 % interval."""
    logs = [math.log(ratio) for ratio in ratios]
    middle = statistics.fmean(logs)
    if len(logs) < 2:
        return math.exp(middle), 0.0, math.inf
    freedom = max(known for known in STUDENT if known < len(logs))
    width = STUDENT[freedom] * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(middle), math.exp(middle - width), math.exp(middle + width)


def run(args):
    prompts = [sides.changed(entry, temperature=0, max_tokens=32) for entry in sides.read_workload("completion")]
    result = {"ratios": [], "failures": []}
    with contextlib.ExitStack() as stack:
        cell = {part.partition("=")[0]: part.partition("=")[2] for part in PACE.split(",")}
        target = paced.start_target(stack, args.foretell, cell)
        policies = {"page": sides.policy("page", sides.DRAFTERS["lookup"], "auto")}
        proxy = sides.start_proxy(stack, args.foretell, target, paced.BACKEND, policies, "auto", args.clients)
        clients = [sides.Side(str(number), proxy.address) for number in range(args.clients)]
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(args.clients))
        result["failures"] += asked(pool, clients, prompts, max(50, args.clients * 4))[1]
        for turn in range(args.alternations):
            seconds = {}
            for is_open in ((True, False) if turn % 2 else (False, True)):
                with page_open(proxy.admin, is_open):
                    seconds[is_open], failures = asked(pool, clients, prompts, args.requests)
                result["failures"] += failures
            if all(seconds.values()):
                result["ratios"].append(statistics.median(seconds[True]) / statistics.median(seconds[False]))
                print(f"alternation {turn + 1}: median {statistics.median(seconds[True]) * 1e3:.2f} ms open, "
                      f"{statistics.median(seconds[False]) * 1e3:.2f} ms closed", flush=True)
        spent = {}
        for is_open in (False, True):
            with page_open(proxy.admin, is_open) as looks:
                begun, wall = cpu_seconds(proxy.process.pid), time.monotonic()
                time.sleep(args.idle)
                spent[is_open] = (cpu_seconds(proxy.process.pid) - begun) / (time.monotonic() - wall)
            result["looks"] = looks.value
        result["share"], result["idle"] = spent[True] - spent[False], spent[False]
    return result


def report(result, args):
    """Prints the figures; returns those beyond their bounds, in words."""
    found = result["failures"][:10]
    if not result["ratios"]:
        return [*found, "nothing was compared"]
    middle, low, high = interval(result["ratios"])
    print(f"request p50 with the page open ÷ closed: {middle:.3f} ({low:.3f} to {high:.3f}, {len(result['ratios'])} alternations of "
          f"{args.requests} requests)")
    print(f"the page costs {100 * result['share']:.2f} % of one core ({result['looks']} looks in {args.idle:g} s; idle without it "
          f"{100 * result['idle']:.2f} %)")
    if high > RATIO_MOST:
        found.append(f"the upper bound of the ratio is {high:.3f}, at most {RATIO_MOST}")
    if result["share"] > SHARE_MOST:
        found.append(f"the page costs {100 * result['share']:.2f} % of one core, at most {100 * SHARE_MOST:g} %")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--foretell", default=str(sides.ROOT / "target/dist/foretell"), metavar="BIN")
    parser.add_argument("--alternations", type=int, default=10, metavar="N")
    parser.add_argument("--requests", type=int, default=120, metavar="N", help="of each turn")
    parser.add_argument("--clients", type=int, default=2, metavar="N")
    parser.add_argument("--idle", type=float, default=60, metavar="S", help="seconds without a request, each way")
    parser.add_argument("--json", type=pathlib.Path, metavar="F")
    args = parser.parse_args()
    try:
        result = run(args)
    except (sides.Wrong, OSError) as error:
        print(f"page.py: {error}", file=sys.stderr)
        return 64
    if args.json:
        args.json.write_text(json.dumps(result))
    found = report(result, args)
    for line in found:
        print(line)
    return 2 if found else 0


if __name__ == "__main__":
    sys.exit(main())
