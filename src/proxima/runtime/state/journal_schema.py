"""The tables of the journal, and the rules that the database itself enforces."""

import re

FORMAT = 2

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;

CREATE TABLE steps (
    step INTEGER PRIMARY KEY,                 -- 1, 2, 3 ... without a hole
    policy_version INTEGER NOT NULL,          -- updates published until then; a step may make none
    cursor TEXT,                              -- JSON: the data cursor behind every prompt admitted so far
    metrics TEXT NOT NULL,                    -- JSON: the step's record
    time TEXT NOT NULL
) STRICT;

CREATE TABLE prompts (
    uid INTEGER PRIMARY KEY,
    epoch INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('queued', 'generating', 'scored', 'selected', 'dropped', 'consumed')),
    admitted_after INTEGER NOT NULL,          -- the journal's step when the prompt was admitted
    attempts INTEGER NOT NULL DEFAULT 0,      -- how often it began to generate
    policy_version INTEGER,                   -- oldest version among its tokens
    completions INTEGER,
    invalid INTEGER,                          -- completions whose scorer failed
    reward REAL,                              -- mean over the valid completions
    step INTEGER,                             -- the step that selected or dropped it
    reason TEXT,                              -- why it was dropped
    admitted_at TEXT NOT NULL, generating_at TEXT, scored_at TEXT, selected_at TEXT, consumed_at TEXT,
    CHECK ((state IN ('selected', 'dropped', 'consumed')) = (step IS NOT NULL)),
    CHECK (state != 'dropped' OR reason IS NOT NULL),
    CHECK (state != 'selected' OR reason IS NULL)
) STRICT;
CREATE INDEX prompts_by_state ON prompts (state, step);

CREATE TABLE checksums (
    name TEXT PRIMARY KEY,                    -- a file of the folder, or a part of the journal: `run.sqlite step 12`
    step INTEGER NOT NULL,                    -- the step that wrote it; -1: none, and a rewind keeps it
    size INTEGER NOT NULL,
    crc32 TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE moves (source TEXT NOT NULL, target TEXT NOT NULL, PRIMARY KEY (source, target)) STRICT, WITHOUT ROWID;
INSERT INTO moves VALUES ('queued', 'generating'), ('generating', 'scored'), ('generating', 'dropped'),
    ('scored', 'selected'), ('scored', 'dropped'), ('selected', 'consumed'), ('dropped', 'consumed');

CREATE TRIGGER prompts_begin BEFORE INSERT ON prompts WHEN NEW.state != 'queued'
    BEGIN SELECT RAISE(ABORT, 'a prompt starts as queued'); END;
CREATE TRIGGER prompts_move BEFORE UPDATE ON prompts
    WHEN NOT EXISTS (SELECT 1 FROM moves WHERE source = OLD.state AND target = NEW.state)
    BEGIN SELECT RAISE(ABORT, 'illegal move of a prompt'); END;
CREATE TRIGGER prompts_consume BEFORE UPDATE ON prompts
    WHEN NEW.state = 'consumed' AND (NEW.step IS NOT OLD.step OR NOT EXISTS (SELECT 1 FROM steps WHERE step = NEW.step))
    BEGIN SELECT RAISE(ABORT, 'a prompt is consumed by the step that selected it'); END;
CREATE TRIGGER steps_in_order BEFORE INSERT ON steps WHEN NEW.step != (SELECT COALESCE(MAX(step), 0) FROM steps) + 1
    BEGIN SELECT RAISE(ABORT, 'a step follows the one before it'); END;
CREATE TRIGGER steps_stand BEFORE UPDATE ON steps BEGIN SELECT RAISE(ABORT, 'a step is never rewritten'); END;
"""

STATEMENTS = re.split(r"(?<=;)\s+(?=CREATE|INSERT)", SCHEMA.strip())  # `executescript` would commit the transaction
