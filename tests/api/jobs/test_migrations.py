"""Databases of earlier versions are brought to this one, and keep their jobs."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest

from api.jobs.database import Database
from api.jobs.store import JobStore
from planner.errors import JobError


def test_migrating_twice_and_at_once_does_no_harm(database: Database) -> None:
    threads = [threading.Thread(target=database.migrate) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    database.check()


def test_jobs_of_the_first_version_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "jobs.sqlite3"
    with sqlite3.connect(file) as first:
        first.executescript(FIRST_VERSION)
    first.close()
    database = Database(f"sqlite:///{file}")
    database.migrate()
    database.check()
    store = JobStore(database)
    done = store.get("a" * 32)
    assert done is not None
    assert (done.status, done.kind, done.plan, done.owner) == ("succeeded", "plan", {"mesh": 1}, "")
    assert store.waiting() == ["b" * 32], "what ran was interrupted"
    assert store.add("fa", {}).id == done.id
    database.close()


def test_jobs_of_the_second_version_are_plans_and_its_servers_go_on(tmp_path: Path) -> None:
    file = tmp_path / "jobs.sqlite3"
    database = Database(f"sqlite:///{file}")
    database.migrate()
    with database.write() as connection:
        connection.exec_driver_sql("ALTER TABLE jobs DROP COLUMN kind")
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = 'v0002'")
        connection.exec_driver_sql(SECOND_VERSION.format(id="a" * 32, fingerprint="fa"))
    with pytest.raises(JobError, match="version v0002, not v0003"):
        database.check()
    database.migrate()
    database.check()
    with database.write() as connection:  # a server of the second version that still runs
        connection.exec_driver_sql(SECOND_VERSION.format(id="b" * 32, fingerprint="fb"))
    assert [(job.id, job.kind) for job in JobStore(database).page(owner="")] == [("b" * 32, "plan"), ("a" * 32, "plan")]
    database.close()


SECOND_VERSION = """
INSERT INTO jobs (id, owner, fingerprint, status, request, label, attempt, deaths, queued_at)
VALUES ('{id}', '', '{fingerprint}', 'queued', '{{}}', '', 0, 0, 1.0)
"""

FIRST_VERSION = """
CREATE TABLE jobs (
    number INTEGER NOT NULL, id VARCHAR(32) NOT NULL, fingerprint VARCHAR(64) NOT NULL, status VARCHAR(16) NOT NULL,
    request TEXT NOT NULL, plan TEXT, error TEXT, queued_at FLOAT NOT NULL, started_at FLOAT, finished_at FLOAT,
    PRIMARY KEY (number), UNIQUE (id), UNIQUE (fingerprint)
);
CREATE INDEX ix_jobs_status ON jobs (status);
INSERT INTO jobs VALUES
    (1, replace(hex(zeroblob(16)), '0', 'a'), 'fa', 'succeeded', '{}', '{"mesh": 1}', NULL, 1, 2, 3);
INSERT INTO jobs VALUES (2, replace(hex(zeroblob(16)), '0', 'b'), 'fb', 'running', '{}', NULL, NULL, 1, 2, NULL);
"""
