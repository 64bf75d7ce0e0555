-- The state of single-leader beat: entries, slots and terms, and the functions that a leader works with.
--
-- Whose turn it is stays in syncguard_locks: every function that a leader writes with proves its lease there first
-- (syncguard_fenced), in the same transaction, so that whoever lost it writes nothing and a takeover waits for the
-- commit of whoever has it. Times are the server's; due_at is the instant at which a slot was due, never when it was
-- sent.

-- One row per entry of a schedule. Slots are counted from last_due_at; those up to since_at are nobody's to send,
-- because the entry was not there yet or had another schedule.
CREATE TABLE syncguard_beat_entries (
  leader_key TEXT NOT NULL,
  entry TEXT NOT NULL,
  schedule TEXT NOT NULL,
  last_due_at TIMESTAMPTZ NOT NULL,
  since_at TIMESTAMPTZ NOT NULL,
  runs BIGINT NOT NULL DEFAULT 0,
  next_due_at TIMESTAMPTZ,
  removed_at TIMESTAMPTZ,
  PRIMARY KEY (leader_key, entry)
);

-- One row per slot that a leader has claimed. Without sent_at and dropped_at it is still to be sent, under this task_id.
CREATE TABLE syncguard_beat_slots (
  leader_key TEXT NOT NULL,
  entry TEXT NOT NULL,
  due_at TIMESTAMPTZ NOT NULL,
  task_id TEXT NOT NULL,
  term BIGINT NOT NULL,
  claimed_at TIMESTAMPTZ NOT NULL,
  sent_at TIMESTAMPTZ,
  dropped_at TIMESTAMPTZ,
  PRIMARY KEY (leader_key, entry, due_at)
);
CREATE INDEX idx_syncguard_beat_slots_claimed ON syncguard_beat_slots (leader_key, claimed_at);
CREATE INDEX idx_syncguard_beat_slots_unsent ON syncguard_beat_slots (leader_key, due_at)
WHERE sent_at IS NULL AND dropped_at IS NULL;

-- One row per term: who led, and how it went.
CREATE TABLE syncguard_beat_terms (
  leader_key TEXT NOT NULL,
  term BIGINT NOT NULL,
  holder TEXT NOT NULL,
  ttl_ms BIGINT NOT NULL,
  elected_at TIMESTAMPTZ NOT NULL,
  seen_at TIMESTAMPTZ NOT NULL,
  ended_at TIMESTAMPTZ,
  last_sent_at TIMESTAMPTZ,
  failing_since TIMESTAMPTZ,
  failure TEXT,
  PRIMARY KEY (leader_key, term)
);

-- A leader says which entries it has, at its election and whenever they change. No rows: it is not the leader.
-- Otherwise the first row has no entry and tells the time; the others are the entries. p_now is the time by which the
-- leader goes, where it knows better than the server's clock.
-- An entry that comes back within an hour goes on where it stopped (a rolling deploy lets two schedules alternate).
CREATE FUNCTION syncguard_beat_enter(
  p_leader_key TEXT,
  p_lock_key TEXT,
  p_lock_id TEXT,
  p_term BIGINT,
  p_holder TEXT,
  p_ttl_ms BIGINT,
  p_entries TEXT[],
  p_schedules TEXT[],
  p_now TIMESTAMPTZ DEFAULT NULL
) RETURNS TABLE (
  entry TEXT, schedule TEXT, last_due_at TIMESTAMPTZ, since_at TIMESTAMPTZ, runs BIGINT, now_at TIMESTAMPTZ
)
LANGUAGE plpgsql VOLATILE
SET lock_timeout = '2s'
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
  v_now TIMESTAMPTZ;
BEGIN
  IF NOT syncguard_fenced(p_lock_key, p_lock_id, p_term) THEN
    RETURN;
  END IF;
  v_now := coalesce(p_now, clock_timestamp());
  INSERT INTO syncguard_beat_terms (leader_key, term, holder, ttl_ms, elected_at, seen_at)
  VALUES (p_leader_key, p_term, p_holder, p_ttl_ms, clock_timestamp(), clock_timestamp())
  ON CONFLICT (leader_key, term) DO NOTHING;
  UPDATE syncguard_beat_terms t SET ended_at = t.seen_at
  WHERE t.leader_key = p_leader_key AND t.term < p_term AND t.ended_at IS NULL;
  INSERT INTO syncguard_beat_entries AS e (leader_key, entry, schedule, last_due_at, since_at)
  SELECT p_leader_key, w.entry, w.schedule, date_trunc('second', v_now), v_now
  FROM unnest(p_entries, p_schedules) AS w (entry, schedule)
  ON CONFLICT (leader_key, entry) DO UPDATE
  SET schedule = excluded.schedule,
    since_at = CASE
      WHEN e.schedule = excluded.schedule AND e.removed_at > v_now - INTERVAL '1 hour' THEN e.since_at
      ELSE v_now
    END,
    removed_at = NULL
  WHERE e.schedule IS DISTINCT FROM excluded.schedule OR e.removed_at IS NOT NULL;
  UPDATE syncguard_beat_entries e SET removed_at = v_now
  WHERE e.leader_key = p_leader_key AND e.removed_at IS NULL AND e.entry <> ALL (p_entries);
  RETURN QUERY
  SELECT NULL::text, NULL::text, NULL::timestamptz, NULL::timestamptz, NULL::bigint, clock_timestamp();
  RETURN QUERY
  SELECT e.entry, e.schedule, e.last_due_at, e.since_at, e.runs, v_now
  FROM syncguard_beat_entries e
  WHERE e.leader_key = p_leader_key AND e.entry = ANY (p_entries);
END
$$;

-- The clock was ahead and is not any more: entries go back to where they were at p_now, the time by which the leader goes.
-- What was sent too early stays sent.
CREATE FUNCTION syncguard_beat_turn_back(
  p_leader_key TEXT, p_lock_key TEXT, p_lock_id TEXT, p_term BIGINT, p_now TIMESTAMPTZ
) RETURNS BOOLEAN
LANGUAGE plpgsql VOLATILE
SET lock_timeout = '2s'
SET search_path FROM CURRENT
AS $$
BEGIN
  IF NOT syncguard_fenced(p_lock_key, p_lock_id, p_term) THEN
    RETURN FALSE;
  END IF;
  UPDATE syncguard_beat_entries e
  SET since_at = least(e.since_at, p_now),
    next_due_at = NULL,
    last_due_at = CASE
      WHEN e.last_due_at <= p_now THEN e.last_due_at
      ELSE coalesce(
        (SELECT max(s.due_at) FROM syncguard_beat_slots s
        WHERE s.leader_key = e.leader_key AND s.entry = e.entry AND s.due_at <= p_now),
        date_trunc('second', p_now)
      )
    END
  WHERE e.leader_key = p_leader_key AND (e.last_due_at > p_now OR e.since_at > p_now);
  RETURN TRUE;
END
$$;

-- Claims one slot for sending. `outcome`:
--   claimed  send it, with task_id. Also for one that was claimed before and never sent: whoever claimed it died, or
--            its broker did, in between.
--   taken    it was sent, or given up.
--   lost     the caller is not the leader any more.
CREATE FUNCTION syncguard_beat_claim(
  p_leader_key TEXT,
  p_lock_key TEXT,
  p_lock_id TEXT,
  p_term BIGINT,
  p_entry TEXT,
  p_schedule TEXT,
  p_due_at TIMESTAMPTZ,
  p_next_due_at TIMESTAMPTZ,
  p_task_id TEXT,
  OUT outcome TEXT,
  OUT task_id TEXT,
  OUT now_at TIMESTAMPTZ
)
LANGUAGE plpgsql VOLATILE
SET lock_timeout = '2s'
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
BEGIN
  IF NOT syncguard_fenced(p_lock_key, p_lock_id, p_term) THEN
    outcome := 'lost';
    now_at := clock_timestamp();
    RETURN;
  END IF;
  INSERT INTO syncguard_beat_slots AS s (leader_key, entry, due_at, task_id, term, claimed_at)
  VALUES (p_leader_key, p_entry, p_due_at, p_task_id, p_term, clock_timestamp())
  ON CONFLICT (leader_key, entry, due_at) DO UPDATE
  SET term = excluded.term, claimed_at = excluded.claimed_at
  WHERE s.sent_at IS NULL AND s.dropped_at IS NULL
  RETURNING s.task_id INTO task_id;
  IF FOUND THEN
    outcome := 'claimed';
    -- The row may have been deleted by hand: the schedule must not lose its place by that.
    INSERT INTO syncguard_beat_entries AS e (leader_key, entry, schedule, last_due_at, since_at, runs, next_due_at)
    VALUES (p_leader_key, p_entry, p_schedule, p_due_at, p_due_at, 1, p_next_due_at)
    ON CONFLICT (leader_key, entry) DO UPDATE
    SET last_due_at = excluded.last_due_at, runs = e.runs + 1, next_due_at = excluded.next_due_at
    WHERE e.last_due_at < excluded.last_due_at;
  ELSE
    outcome := 'taken';
  END IF;
  now_at := clock_timestamp();
END
$$;

-- The broker has the message of this slot (or, with p_dropped, nobody is to send it any more). Not fenced: it is true
-- whoever leads by now.
CREATE FUNCTION syncguard_beat_sent(
  p_leader_key TEXT, p_entry TEXT, p_due_at TIMESTAMPTZ, p_term BIGINT, p_dropped BOOLEAN DEFAULT FALSE
) RETURNS BOOLEAN
LANGUAGE plpgsql VOLATILE
SET lock_timeout = '2s'
SET search_path FROM CURRENT
AS $$
BEGIN
  IF p_dropped THEN
    UPDATE syncguard_beat_slots s SET dropped_at = clock_timestamp()
    WHERE s.leader_key = p_leader_key AND s.entry = p_entry AND s.due_at = p_due_at
      AND s.sent_at IS NULL AND s.dropped_at IS NULL;
    RETURN FOUND;
  END IF;
  UPDATE syncguard_beat_slots s SET sent_at = clock_timestamp(), term = p_term, dropped_at = NULL
  WHERE s.leader_key = p_leader_key AND s.entry = p_entry AND s.due_at = p_due_at AND s.sent_at IS NULL;
  RETURN FOUND;
END
$$;

-- A sign of life of the leader, for people and probes: p_failure is why it cannot send now, NULL if it can; p_sent_at
-- its last send; p_ended: this term is over. Answers with the time.
CREATE FUNCTION syncguard_beat_seen(
  p_leader_key TEXT, p_term BIGINT, p_failure TEXT, p_sent BOOLEAN, p_ended BOOLEAN DEFAULT FALSE
) RETURNS TIMESTAMPTZ
LANGUAGE plpgsql VOLATILE
SET lock_timeout = '2s'
SET search_path FROM CURRENT
AS $$
DECLARE
  v_now TIMESTAMPTZ := clock_timestamp();
BEGIN
  PERFORM set_config('synchronous_commit', 'off', TRUE);
  UPDATE syncguard_beat_terms t
  SET seen_at = v_now,
    last_sent_at = CASE WHEN p_sent THEN v_now ELSE t.last_sent_at END,
    failing_since = CASE WHEN p_failure IS NULL THEN NULL ELSE coalesce(t.failing_since, v_now) END,
    failure = p_failure,
    ended_at = CASE WHEN p_ended THEN v_now ELSE t.ended_at END
  WHERE t.leader_key = p_leader_key AND t.term = p_term;
  RETURN v_now;
END
$$;

-- Slots that were claimed and never sent, oldest first: the next leader's first work. A page of them, after the given one.
CREATE FUNCTION syncguard_beat_unsent(
  p_leader_key TEXT,
  p_after_due_at TIMESTAMPTZ DEFAULT '-infinity',
  p_after_entry TEXT DEFAULT '',
  p_limit INTEGER DEFAULT 1000
)
RETURNS TABLE (entry TEXT, due_at TIMESTAMPTZ, task_id TEXT)
LANGUAGE sql VOLATILE
SET search_path FROM CURRENT
AS $$
  SELECT s.entry, s.due_at, s.task_id
  FROM syncguard_beat_slots s
  WHERE s.leader_key = p_leader_key AND s.sent_at IS NULL AND s.dropped_at IS NULL
    AND (s.due_at, s.entry) > (p_after_due_at, p_after_entry)
  ORDER BY s.due_at, s.entry
  LIMIT p_limit
$$;

-- The latest slots, newest claim first.
CREATE FUNCTION syncguard_beat_recent(p_leader_key TEXT, p_entry TEXT DEFAULT NULL, p_limit INTEGER DEFAULT 20)
RETURNS TABLE (
  entry TEXT, due_at TIMESTAMPTZ, task_id TEXT, term BIGINT, claimed_at TIMESTAMPTZ, sent_at TIMESTAMPTZ,
  dropped_at TIMESTAMPTZ
)
LANGUAGE sql VOLATILE
SET search_path FROM CURRENT
AS $$
  SELECT s.entry, s.due_at, s.task_id, s.term, s.claimed_at, s.sent_at, s.dropped_at
  FROM syncguard_beat_slots s
  WHERE s.leader_key = p_leader_key AND (p_entry IS NULL OR s.entry = p_entry)
  ORDER BY s.claimed_at DESC, s.due_at DESC
  LIMIT p_limit
$$;

-- The latest terms, newest first.
CREATE FUNCTION syncguard_beat_history(p_leader_key TEXT, p_limit INTEGER DEFAULT 1)
RETURNS TABLE (
  term BIGINT, holder TEXT, ttl_ms BIGINT, elected_at TIMESTAMPTZ, seen_at TIMESTAMPTZ, ended_at TIMESTAMPTZ,
  last_sent_at TIMESTAMPTZ, failing_since TIMESTAMPTZ, failure TEXT, now_at TIMESTAMPTZ
)
LANGUAGE sql VOLATILE
SET search_path FROM CURRENT
AS $$
  SELECT t.term, t.holder, t.ttl_ms, t.elected_at, t.seen_at, t.ended_at, t.last_sent_at, t.failing_since, t.failure,
    clock_timestamp()
  FROM syncguard_beat_terms t
  WHERE t.leader_key = p_leader_key
  ORDER BY t.term DESC
  LIMIT p_limit
$$;

-- Deletes slots and terms that have been over for p_older_ms, and entries that were removed so long ago; at most
-- p_limit of each. Answers how many slots went.
CREATE FUNCTION syncguard_beat_prune(p_leader_key TEXT, p_older_ms BIGINT, p_limit INTEGER DEFAULT 10000)
RETURNS BIGINT
LANGUAGE plpgsql VOLATILE
SET lock_timeout = '2s'
SET search_path FROM CURRENT
AS $$
DECLARE
  v_before TIMESTAMPTZ := clock_timestamp() - p_older_ms * INTERVAL '1 millisecond';
  v_count BIGINT;
BEGIN
  DELETE FROM syncguard_beat_slots WHERE ctid = ANY (ARRAY(
    SELECT s.ctid FROM syncguard_beat_slots s
    WHERE s.leader_key = p_leader_key AND s.claimed_at < v_before AND s.due_at < v_before
    LIMIT p_limit FOR UPDATE SKIP LOCKED
  ));
  GET DIAGNOSTICS v_count = ROW_COUNT;
  DELETE FROM syncguard_beat_terms t WHERE t.leader_key = p_leader_key AND t.seen_at < v_before;
  DELETE FROM syncguard_beat_entries e WHERE e.leader_key = p_leader_key AND e.removed_at < v_before;
  RETURN v_count;
END
$$;
