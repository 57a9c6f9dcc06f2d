#!/usr/bin/env python3
"""An old client of the coordinator's protocol, at the level of the wire.

It knows nothing of what was added later: no revokingShards, instanceId, sequence or metadataToken. It replaces
what it reads on OK, keeps the intersection on SYNC_METADATA and REVOKE_PENDING, forgets on UNKNOWN_MEMBER_ID
and FENCED_MEMBER_EPOCH, and keeps on RETRY and on everything that is no answer. Its lease is a setting of its
own, counted from the moment a heartbeat is sent; when it runs out, the client stops reading and joins anew.

It writes one JSON object a line: from `at` on it reads `reading`, until the next line or until `until`,
whichever comes first. Both are milliseconds of the system's monotonic clock, the same for every process of
this machine. After `--seconds`, or on SIGTERM, it leaves. Standard library only.
"""

import argparse
import http.client
import json
import signal
import sys
import time
import urllib.parse
import uuid


def now_ms():
    return time.clock_gettime(time.CLOCK_MONOTONIC) * 1000.0


class Refused(Exception):
    """The coordinator wants a person to look at it."""


class OldClient:
    def __init__(self, options, log):
        url = urllib.parse.urlsplit(options.url)
        self.host, self.port = url.hostname, url.port
        names = [urllib.parse.quote(name, safe="") for name in (options.stream, options.group, options.member)]
        self.path = "/coord/v1/streams/{}/groups/{}/members/{}/heartbeat".format(*names)
        self.member, self.lease_ms, self.log = options.member, options.lease * 1000.0, log
        self.timeout = max(0.2, options.lease / 3.0)
        self.connection = None
        self.epoch, self.version = 0, 0
        self.reading, self.until = set(), 0.0
        self.interval_ms = options.interval * 1000.0

    def note(self, event, **facts):
        line = {"at": now_ms(), "event": event, "member": self.member, "reading": sorted(self.reading),
                "until": self.until, "epoch": self.epoch, "version": self.version}
        line.update(facts)
        self.log.write(json.dumps(line) + "\n")
        self.log.flush()

    def send(self, epoch):
        """One heartbeat: the answer's body, or None when there was none or it was no success."""
        body = {
            "protocolVersion": 1,
            "requestId": str(uuid.uuid4()),
            "memberId": self.member,
            "memberEpoch": epoch,
            "metadataVersion": self.version,
            "runtimeConsumerCapacity": {"runtimeMaxConcurrency": 4, "availableConcurrency": 4},
            "ownedShards": [{"shardIndex": shard} for shard in sorted(self.reading)],
        }
        try:
            if self.connection is None:
                self.connection = http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)
            self.connection.request("POST", self.path, json.dumps(body), {"content-type": "application/json"})
            response = self.connection.getresponse()
            text = response.read()
            if response.will_close:
                self.disconnect()
        except (OSError, http.client.HTTPException):
            self.disconnect()
            return None
        if response.status != 200:
            self.note("refused", status=response.status)
            return None
        answer = json.loads(text)
        return answer if answer["responseTo"] == body["requestId"] else None

    def disconnect(self):
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def lease_is_over(self):
        """Whether it was over; then everything is forgotten and the next heartbeat joins anew."""
        if self.epoch == 0 or now_ms() < self.until:
            return False
        self.reading, self.epoch = set(), 0
        self.note("lease over")
        return True

    def beat(self):
        self.lease_is_over()
        sent = now_ms()
        answer = self.send(self.epoch)
        if answer is None or self.lease_is_over():
            return
        status = answer["status"]
        assigned = {shard["shardIndex"] for shard in answer["assignment"]["assignedShards"]}
        if status == "OK":
            self.reading = assigned
        elif status in ("SYNC_METADATA", "REVOKE_PENDING"):
            self.reading &= assigned
        elif status in ("UNKNOWN_MEMBER_ID", "FENCED_MEMBER_EPOCH"):
            self.reading, self.epoch, self.version = set(), 0, answer["metadataVersion"]
        elif status != "RETRY":
            raise Refused("{}: {}".format(status, answer.get("reason", "")))
        if status in ("OK", "SYNC_METADATA", "REVOKE_PENDING"):
            self.epoch, self.version = answer["memberEpoch"], answer["metadataVersion"]
            self.until = sent + self.lease_ms
        if answer["heartbeatIntervalMs"] > 0:
            self.interval_ms = answer["heartbeatIntervalMs"]
        self.note(status)

    def leave(self):
        self.reading = set()
        self.note("leaving")
        for _ in range(10):
            answer = self.send(-1)
            if answer is not None and answer["status"] != "RETRY":
                break
            time.sleep(self.interval_ms / 1000.0)
        self.note("left")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", required=True, help="of the coordinator, http://host:port")
    parser.add_argument("--stream", required=True)
    parser.add_argument("--group", required=True)
    parser.add_argument("--member", required=True)
    parser.add_argument("--seconds", required=True, type=float, help="leave after that long")
    parser.add_argument("--log", required=True, help="file for JSON lines")
    parser.add_argument("--lease", type=float, default=15.0, help="seconds; at most the coordinator's")
    parser.add_argument("--interval", type=float, default=3.0, help="seconds, until the coordinator says it")
    options = parser.parse_args()

    stopping = []
    signal.signal(signal.SIGTERM, lambda *_: stopping.append(True))
    end = now_ms() + options.seconds * 1000.0
    with open(options.log, "a", encoding="utf-8") as log:
        client = OldClient(options, log)
        client.note("started")
        try:
            while not stopping and now_ms() < end:
                client.beat()
                # Short naps, so that neither a signal nor the lease is noticed late.
                wake = min(now_ms() + client.interval_ms, end)
                while not stopping and now_ms() < wake:
                    time.sleep(min(0.05, max(0.0, (wake - now_ms()) / 1000.0)))
                    client.lease_is_over()
            client.leave()
        except Refused as refused:
            client.reading = set()
            client.note("refused for good", reason=str(refused))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
