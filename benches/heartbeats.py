#!/usr/bin/env python3
"""Heartbeats per second through a running daemon, with the Redis commands each of them costs.

Usage: heartbeats.py --url http://127.0.0.1:8080 --redis-port 6379 --groups 1 --members 100 --seconds 10

Joins every member, heartbeats until each group is STABLE, then lets `wrk` (apt-get install wrk) repeat each
member's steady heartbeat and reads Redis' own command statistics before and after. Standard library only;
loopback addresses only.
"""
import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
from http.client import HTTPConnection


def redis_commands(port):
    """Calls by command, as the server counted them."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(b"INFO commandstats\r\n")
        data = b""
        while b"\r\n" not in data:
            data += connection.recv(65536)
        length, _, rest = data.partition(b"\r\n")
        wanted = int(length[1:]) + 2
        while len(rest) < wanted:
            rest += connection.recv(65536)
    return {name: int(calls) for name, calls in re.findall(r"cmdstat_(\S+?):calls=(\d+)", rest.decode())}


class Daemon:
    def __init__(self, url):
        self.at = urllib.parse.urlsplit(url)
        if self.at.hostname not in ("127.0.0.1", "localhost", "::1"):
            sys.exit("only loopback addresses are a target of load")
        self.connection = HTTPConnection(self.at.hostname, self.at.port, timeout=30)

    def post(self, path, body):
        self.connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = self.connection.getresponse()
        return answer.status, json.loads(answer.read())

    def get(self, path):
        self.connection.request("GET", path)
        answer = self.connection.getresponse()
        return answer.status, json.loads(answer.read())


def body(member, state, request):
    return {
        "protocolVersion": 1,
        "requestId": request,
        "memberId": member,
        "memberEpoch": state["epoch"],
        "metadataVersion": state["version"],
        "runtimeConsumerCapacity": {"runtimeMaxConcurrency": 4, "availableConcurrency": 4},
        "ownedShards": [{"shardIndex": shard} for shard in state["owned"]],
        "revokingShards": [],
    }


def settle(daemon, stream, members):
    """Heartbeats of every member until the group is stable; returns path and state of each."""
    paths = {m: f"/coord/v1/streams/{stream}/groups/{stream}/members/{m}/heartbeat" for m in members}
    states = {m: {"epoch": 0, "version": 0, "owned": []} for m in members}
    for round_number in range(50):
        for member in members:
            status, answer = daemon.post(paths[member], body(member, states[member], f"r{round_number}"))
            if status != 200 or answer["status"] not in ("OK", "RETRY"):
                sys.exit(f"{member}: {status} {answer}")
            if answer["status"] == "OK":
                owned = [shard["shardIndex"] for shard in answer["assignment"]["assignedShards"]]
                states[member] = {"epoch": answer["memberEpoch"], "version": answer["metadataVersion"], "owned": owned}
        summary = daemon.get(f"/coord/v1/monitoring/streams/{stream}/groups/{stream}")[1]
        if round_number > 1 and summary["state"] == "STABLE":
            return [(paths[member], body(member, states[member], "steady")) for member in members]
    sys.exit(f"{stream} does not become stable: {summary}")


LUA = """
local requests, next_one = {}, 0
local bodies = %s
function init(args)
  for i = 1, #bodies, 2 do
    requests[#requests + 1] = wrk.format("POST", bodies[i], {["Content-Type"] = "application/json"}, bodies[i + 1])
  end
  next_one = math.random(#requests)
end
function request()
  next_one = next_one %% #requests + 1
  return requests[next_one]
end
local refused = 0
function response(status, headers, body)
  if status ~= 200 or not body:find('"status":"OK"', 1, true) then refused = refused + 1 end
end
local threads = {}
function setup(thread) table.insert(threads, thread) end
function done(summary, latency, counts)
  io.write(string.format("requests %%d seconds %%.3f p50_us %%d p99_us %%d errors %%d\\n", summary.requests,
    summary.duration / 1e6, latency:percentile(50), latency:percentile(99),
    summary.errors.connect + summary.errors.read + summary.errors.write + summary.errors.status + summary.errors.timeout))
end
"""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--redis-port", type=int, required=True)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--members", type=int, default=100)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--connections", type=int, default=64)
    arguments = parser.parse_args()
    if not 1 <= arguments.seconds <= 120:
        sys.exit("--seconds: 1 to 120")
    daemon = Daemon(arguments.url)
    steady = []
    for group in range(arguments.groups):
        stream = f"bench{arguments.groups}x{arguments.members}-{os.getpid()}-{group}"
        creation = {"requestedBy": "bench", "initialShardCount": max(arguments.members, 12)}
        status, answer = daemon.post(f"/coord/v1/streams/{stream}", creation)
        if status not in (201, 409):
            sys.exit(f"{stream}: {status} {answer}")
        members = [f"m{number}" for number in range(arguments.members)]
        steady += settle(daemon, stream, members)
    table = "{" + ",".join(json.dumps(path) + "," + json.dumps(json.dumps(body)) for path, body in steady) + "}"
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(LUA % table)
        script.flush()
        before = redis_commands(arguments.redis_port)
        run = subprocess.run(
            ["wrk", "-t1", f"-c{arguments.connections}", f"-d{arguments.seconds}s", "-s", script.name, arguments.url],
            capture_output=True, text=True, check=True, timeout=arguments.seconds + 60)
        after = redis_commands(arguments.redis_port)
    line = next(line for line in run.stdout.splitlines() if line.startswith("requests "))
    words = dict(zip(line.split()[::2], line.split()[1::2]))
    requests, seconds = int(words["requests"]), float(words["seconds"])
    calls = {name: after[name] - before.get(name, 0) for name in after if after[name] > before.get(name, 0)}
    scripts = sum(calls.get(name, 0) for name in ("evalsha", "eval"))
    inside = sum(calls.values()) - scripts
    print(f"{arguments.groups} x {arguments.members}: {requests / seconds:,.0f} heartbeats/s, p50 "
          f"{int(words['p50_us']) / 1000:.2f} ms, p99 {int(words['p99_us']) / 1000:.2f} ms, errors {words['errors']}, "
          f"script calls per heartbeat {scripts / requests:.3f}, commands inside scripts per heartbeat {inside / requests:.3f}")


if __name__ == "__main__":
    main()
