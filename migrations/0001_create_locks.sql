-- Locks, their fence counters, and the functions that work on them.
--
-- The two tables up to the marked columns are kriasoft/syncguard's PostgreSQL schema, so that its TypeScript
-- client and this library can share them; where it came first, its tables are adopted. Everything below the mark is
-- nullable and ours.
--
-- Rules that every function keeps:
--   * time is clock_timestamp(), read after a row lock was granted, so that waiting costs nobody a part of a ttl;
--   * whoever writes a lock row takes the TypeScript client's advisory lock first;
--   * nobody waits for a row lock without a bound;
--   * a fence is computed inside the update of the counter, under the counter's row lock.

DO $$
BEGIN
  IF to_regclass('syncguard_locks') IS NOT NULL THEN
    RAISE WARNING 'the tables of the TypeScript client are adopted and get columns: services that use it now must connect '
      'anew once, as their prepared statements fail until then ("cached plan must not change result type")';
  END IF;
END
$$;

CREATE TABLE IF NOT EXISTS syncguard_locks (
  key TEXT PRIMARY KEY,
  lock_id TEXT NOT NULL,
  expires_at_ms BIGINT NOT NULL,
  acquired_at_ms BIGINT NOT NULL,
  fence TEXT NOT NULL,
  user_key TEXT NOT NULL
);

CREATE UNIQUE INDEX IF NOT EXISTS idx_syncguard_locks_lock_id ON syncguard_locks (lock_id);
CREATE INDEX IF NOT EXISTS idx_syncguard_locks_expires ON syncguard_locks (expires_at_ms);

CREATE TABLE IF NOT EXISTS syncguard_fence_counters (
  fence_key TEXT PRIMARY KEY,
  fence BIGINT NOT NULL DEFAULT 0,
  key_debug TEXT
);

ALTER TABLE syncguard_locks
ADD COLUMN IF NOT EXISTS expires_at_ts TIMESTAMPTZ GENERATED ALWAYS AS (to_timestamp(expires_at_ms / 1000.0)) STORED,
ADD COLUMN IF NOT EXISTS acquired_at_ts TIMESTAMPTZ GENERATED ALWAYS AS (to_timestamp(acquired_at_ms / 1000.0)) STORED;

-- Ours. They describe the lease named by holder_lock_id. A row taken over by the TypeScript client keeps them, so they
-- count only while holder_lock_id = lock_id.
ALTER TABLE syncguard_locks
ADD COLUMN holder_lock_id TEXT,
ADD COLUMN holder TEXT,
ADD COLUMN process TEXT,
ADD COLUMN task_id TEXT,
ADD COLUMN attempt INTEGER,
ADD COLUMN call_id TEXT,
ADD COLUMN claim_key TEXT,
ADD COLUMN copies BOOLEAN,
ADD COLUMN waiting_until_ms BIGINT,
ADD COLUMN deaths INTEGER;

-- What is finished: run_key is what a run_once task is remembered by, or one attempt of a task whose copy was seen
-- while it ran.
CREATE TABLE syncguard_completions (
  run_key TEXT PRIMARY KEY,
  task_id TEXT,
  completed_at_ms BIGINT NOT NULL,
  expires_at_ms BIGINT NOT NULL,
  fingerprint TEXT
);
CREATE INDEX idx_syncguard_completions_expires ON syncguard_completions (expires_at_ms);

-- By the expired lease of its task a claim is known to be over (syncguard_claim).
CREATE INDEX idx_syncguard_locks_claim ON syncguard_locks (claim_key) WHERE claim_key IS NOT NULL;

-- Work that is queued or running. The task id owns the claim. fingerprint: of its arguments, as of a completion's; the key
-- says what counts as the same work, and this whether more was the same. next_task_id: a task that is to run again under the same
-- claim as soon as its owner starts (dedup_until="start").
CREATE TABLE syncguard_claims (
  claim_key TEXT PRIMARY KEY,
  task_id TEXT NOT NULL,
  holder TEXT,
  claimed_at_ms BIGINT NOT NULL,
  expires_at_ms BIGINT NOT NULL,
  next_task_id TEXT,
  fingerprint TEXT
);
CREATE INDEX idx_syncguard_claims_expires ON syncguard_claims (expires_at_ms);

-- How many leases in a row ended because their process died instead of by a release. The subject is `task:` and a task
-- id, or `key:` and a lock's key; lock_id is the last of these leases. An attempt that ends by itself ends the row.
CREATE TABLE syncguard_deaths (
  subject TEXT PRIMARY KEY,
  deaths INTEGER NOT NULL,
  last_at_ms BIGINT NOT NULL,
  lock_id TEXT
);

-- The server's clock in milliseconds since 1970. Never stale: it moves inside a transaction.
CREATE FUNCTION syncguard_clock_ms() RETURNS BIGINT
LANGUAGE sql VOLATILE
RETURN (extract(epoch FROM clock_timestamp()) * 1000)::bigint;

-- A fence as it is stored and compared: 15 digits. A counter that has left the range is refused.
CREATE FUNCTION syncguard_fence_text(p_fence BIGINT) RETURNS TEXT
LANGUAGE plpgsql IMMUTABLE
SET search_path FROM CURRENT
AS $$
BEGIN
  IF p_fence < 0 OR p_fence > 900000000000000 THEN
    RAISE EXCEPTION 'fence % is out of range', p_fence USING ERRCODE = 'SG001';
  END IF;
  RETURN lpad(p_fence::text, 15, '0');
END
$$;

-- Takes the lock `p_key` for `p_ttl_ms`, in one round trip. The answer's `outcome`:
--   granted  lock_id, fence, acquired_at_ms, expires_at_ms are the new lease's. Repeating a call with the same
--            p_lock_id while that lease lives gives the same grant again.
--   held     another lease is live: its lock_id, fence, times, holder, task_id, attempt, call_id (where known). Writes
--            nothing.
--   done     one of p_run_keys is completed: run_key, task_id, acquired_at_ms (the moment of completion).
--   dead     the last p_max_deaths leases of p_task_id ended by the death of their process: deaths, task_id. Or the last
--            2 * p_max_deaths on p_key did, whoever held them, and the last of them within an hour: deaths, no task_id.
-- p_claim_key with p_claim_ttl_ms keeps the task's claim alive for the run; without p_claim_ttl_ms the claim ends here.
-- p_claim_wait_ms keeps it alive while the lock is held.
CREATE FUNCTION syncguard_acquire(
  p_key TEXT,
  p_lock_id TEXT,
  p_ttl_ms BIGINT,
  p_holder TEXT DEFAULT NULL,
  p_process TEXT DEFAULT NULL,
  p_task_id TEXT DEFAULT NULL,
  p_attempt INTEGER DEFAULT NULL,
  p_run_keys TEXT[] DEFAULT NULL,
  p_max_deaths INTEGER DEFAULT NULL,
  p_claim_key TEXT DEFAULT NULL,
  p_claim_ttl_ms BIGINT DEFAULT NULL,
  p_call_id TEXT DEFAULT NULL,
  p_claim_wait_ms BIGINT DEFAULT NULL,
  OUT outcome TEXT,
  OUT now_ms BIGINT,
  OUT lock_id TEXT,
  OUT fence BIGINT,
  OUT acquired_at_ms BIGINT,
  OUT expires_at_ms BIGINT,
  OUT holder TEXT,
  OUT task_id TEXT,
  OUT attempt INTEGER,
  OUT call_id TEXT,
  OUT run_key TEXT,
  OUT deaths INTEGER,
  OUT fingerprint TEXT
)
LANGUAGE plpgsql VOLATILE
SET lock_timeout = '2s'
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
  v_row syncguard_locks%ROWTYPE;
  v_done syncguard_completions%ROWTYPE;
  v_run_key TEXT;
  v_died BOOLEAN := FALSE;
  v_deaths INTEGER;
  v_key_deaths INTEGER;
  v_locked BOOLEAN := FALSE;
BEGIN
  -- Two looks: without the advisory lock, so that a held lock costs one read; and again with it, since the first may
  -- be out of date by then.
  LOOP
    SELECT * INTO v_row FROM syncguard_locks l WHERE l.key = p_key;
    now_ms := syncguard_clock_ms();
    IF FOUND AND v_row.expires_at_ms > now_ms THEN
      IF v_row.lock_id = p_lock_id THEN
        outcome := 'granted';
      ELSE
        outcome := 'held';
      END IF;
      EXIT;
    END IF;
    EXIT WHEN v_locked;
    PERFORM pg_advisory_xact_lock(hashtext(p_key));
    -- Whoever is writing the row (a renewal, a waiter, a prune) is waited for, so that from here on a locked row is one in
    -- use by a transaction that called fenced(), and by nobody else.
    PERFORM 1 FROM syncguard_locks l WHERE l.key = p_key FOR NO KEY UPDATE;
    v_locked := TRUE;
  END LOOP;

  IF outcome IS NULL THEN
    -- Completions are written by whoever holds the lock, before it is free.
    -- One by one, since the plan of an `= ANY` over all of them would be made anew for every call.
    FOREACH v_run_key IN ARRAY coalesce(p_run_keys, '{}') LOOP
      SELECT * INTO v_done FROM syncguard_completions c WHERE c.run_key = v_run_key AND c.expires_at_ms > now_ms;
      IF FOUND THEN
        outcome := 'done';
        run_key := v_done.run_key;
        task_id := v_done.task_id;
        acquired_at_ms := v_done.completed_at_ms;
        fingerprint := v_done.fingerprint;
        RETURN;
      END IF;
    END LOOP;

    -- An expired lease of the process that asks is no death, as that lives. Nor is an expired row of p_lock_id itself: an
    -- answer that got lost long ago.
    v_died := v_row.key IS NOT NULL AND v_row.task_id IS NOT NULL AND v_row.holder_lock_id = v_row.lock_id
      AND v_row.lock_id <> p_lock_id AND NOT coalesce(v_row.process = p_process, FALSE);
    IF p_max_deaths IS NOT NULL AND p_task_id IS NOT NULL THEN
      SELECT d.deaths INTO v_deaths FROM syncguard_deaths d WHERE d.subject = 'task:' || p_task_id;
      -- 0 for a row that is too old to count: it is there all the same, and a good attempt ends it.
      SELECT CASE WHEN d.last_at_ms > now_ms - 3600000 THEN d.deaths ELSE 0 END INTO v_key_deaths
      FROM syncguard_deaths d WHERE d.subject = 'key:' || p_key;
      IF v_died AND v_row.task_id = p_task_id THEN
        v_deaths := coalesce(v_deaths, 0) + 1;
      END IF;
      IF v_died AND v_row.expires_at_ms > now_ms - 3600000 THEN
        v_key_deaths := coalesce(v_key_deaths, 0) + 1;
      END IF;
      IF v_deaths >= p_max_deaths THEN
        outcome := 'dead';
        deaths := v_deaths;
        task_id := p_task_id;
        RETURN;
      ELSIF v_key_deaths >= 2 * p_max_deaths THEN
        outcome := 'dead';
        deaths := v_key_deaths;
        RETURN;
      END IF;
    END IF;

    IF v_row.key IS NULL THEN
      WITH counter AS (
        INSERT INTO syncguard_fence_counters AS c (fence_key, fence, key_debug)
        VALUES ('fence:' || p_key, syncguard_clock_ms(), p_key)
        ON CONFLICT (fence_key) DO UPDATE SET fence = greatest(c.fence + 1, syncguard_clock_ms())
        RETURNING c.fence
      )
      INSERT INTO syncguard_locks AS l (
        key, lock_id, expires_at_ms, acquired_at_ms, fence, user_key,
        holder_lock_id, holder, process, task_id, attempt, call_id, claim_key, deaths
      )
      SELECT p_key, p_lock_id, t.now_ms + p_ttl_ms, t.now_ms, syncguard_fence_text(counter.fence), p_key,
        p_lock_id, p_holder, p_process, p_task_id, p_attempt, p_call_id, CASE WHEN p_claim_ttl_ms IS NOT NULL THEN p_claim_key END,
        coalesce(v_deaths, v_key_deaths)
      FROM counter, LATERAL (SELECT syncguard_clock_ms() + 0 * counter.fence AS now_ms) t
      ON CONFLICT (key) DO NOTHING
      RETURNING l.* INTO v_row;
      IF FOUND THEN
        outcome := 'granted';
      ELSE
        -- Only a writer that skips the advisory lock gets here.
        SELECT * INTO v_row FROM syncguard_locks l WHERE l.key = p_key;
        IF NOT FOUND THEN
          RAISE EXCEPTION 'the lock on % changes hands faster than it can be read', p_key USING ERRCODE = '40001';
        END IF;
        outcome := 'held';
      END IF;
    ELSE
      -- Expired. A row that somebody has locked is in use by a transaction that called fenced().
      PERFORM 1 FROM syncguard_locks l
      WHERE l.key = p_key AND l.lock_id = v_row.lock_id AND l.expires_at_ms <= now_ms
      FOR UPDATE SKIP LOCKED;
      IF NOT FOUND THEN
        SELECT * INTO v_row FROM syncguard_locks l WHERE l.key = p_key;
        outcome := 'held';
      ELSE
        -- Looked at again: the holder's own transaction that called complete() had this row locked until its end, which may
        -- have come after the first look. From now on nobody can complete under the old lease.
        FOREACH v_run_key IN ARRAY coalesce(p_run_keys, '{}') LOOP
          SELECT * INTO v_done FROM syncguard_completions c WHERE c.run_key = v_run_key AND c.expires_at_ms > now_ms;
          IF FOUND THEN
            outcome := 'done';
            run_key := v_done.run_key;
            task_id := v_done.task_id;
            acquired_at_ms := v_done.completed_at_ms;
            fingerprint := v_done.fingerprint;
            RETURN;
          END IF;
        END LOOP;
        IF p_run_keys IS NOT NULL AND current_setting('transaction_isolation') <> 'read committed' THEN
          -- There every look sees what was there at the start. Only the index knows what came since: a conflict with that
          -- fails to serialize, and whoever asks again sees it.
          INSERT INTO syncguard_completions (run_key, completed_at_ms, expires_at_ms)
          SELECT w.run_key, 0, 0 FROM unnest(p_run_keys) AS w (run_key)
          ON CONFLICT DO NOTHING;
          DELETE FROM syncguard_completions c WHERE c.run_key = ANY (p_run_keys) AND c.expires_at_ms = 0;
        END IF;
        IF v_died THEN
          PERFORM syncguard_count_death(p_key, v_row.task_id, v_row.lock_id);
          v_key_deaths := coalesce(v_key_deaths, 1);
          -- Whoever held it is dead, and so is the work that it claimed, unless this is its next delivery.
          IF v_row.task_id IS DISTINCT FROM p_task_id THEN
            DELETE FROM syncguard_claims c WHERE c.claim_key = v_row.claim_key AND c.task_id = v_row.task_id;
          END IF;
        END IF;
        WITH counter AS (
          INSERT INTO syncguard_fence_counters AS c (fence_key, fence, key_debug)
          VALUES ('fence:' || p_key, syncguard_clock_ms(), p_key)
          ON CONFLICT (fence_key) DO UPDATE SET fence = greatest(c.fence + 1, syncguard_clock_ms())
          RETURNING c.fence
        )
        UPDATE syncguard_locks l
        SET lock_id = p_lock_id, expires_at_ms = t.now_ms + p_ttl_ms, acquired_at_ms = t.now_ms,
          fence = syncguard_fence_text(counter.fence), user_key = p_key,
          holder_lock_id = p_lock_id, holder = p_holder, process = p_process, task_id = p_task_id,
          attempt = p_attempt, call_id = p_call_id, claim_key = CASE WHEN p_claim_ttl_ms IS NOT NULL THEN p_claim_key END, copies = NULL, waiting_until_ms = NULL,
          deaths = coalesce(v_deaths, v_key_deaths)
        FROM counter, LATERAL (SELECT syncguard_clock_ms() + 0 * counter.fence AS now_ms) t
        WHERE l.key = p_key
        RETURNING l.* INTO v_row;
        outcome := 'granted';
      END IF;
    END IF;
  END IF;

  IF outcome = 'granted' THEN
    IF p_claim_key IS NOT NULL THEN
      IF p_claim_ttl_ms IS NULL THEN
        PERFORM syncguard_end_claim(p_claim_key, p_task_id, p_claim_wait_ms);
      ELSE
        PERFORM 1 FROM syncguard_claims c
        WHERE c.claim_key = p_claim_key AND c.expires_at_ms > now_ms + p_claim_ttl_ms / 2;
        IF NOT FOUND THEN
          PERFORM syncguard_claim(p_claim_key, p_task_id, p_claim_ttl_ms, p_holder);
        END IF;
      END IF;
    END IF;
  ELSIF v_row.task_id = p_task_id AND v_row.attempt = p_attempt AND v_row.call_id IS NOT DISTINCT FROM p_call_id
    AND v_row.holder_lock_id = v_row.lock_id AND v_row.copies IS NOT TRUE THEN
    -- A copy of the very attempt that runs. The holder's release then leaves a completion for it.
    UPDATE syncguard_locks l SET copies = TRUE WHERE l.key = p_key AND l.lock_id = v_row.lock_id;
  END IF;

  IF outcome = 'held' AND p_claim_wait_ms IS NOT NULL THEN
    -- It lives as long as its message waits.
    UPDATE syncguard_claims c SET expires_at_ms = now_ms + p_claim_wait_ms
    WHERE c.claim_key = p_claim_key AND c.task_id = p_task_id AND c.expires_at_ms < now_ms + p_claim_wait_ms / 2;
  END IF;

  lock_id := v_row.lock_id;
  -- Other clients write this table too: a fence that is no number is null, and the answer is what it is.
  fence := CASE WHEN v_row.fence ~ '^[0-9]{1,18}$' THEN v_row.fence::bigint END;
  acquired_at_ms := v_row.acquired_at_ms;
  expires_at_ms := v_row.expires_at_ms;
  now_ms := syncguard_clock_ms();
  IF v_row.holder_lock_id = v_row.lock_id THEN
    holder := v_row.holder;
    task_id := v_row.task_id;
    attempt := v_row.attempt;
    call_id := v_row.call_id;
  END IF;
END
$$;

-- Renews every given lease that is still there, in one statement: a full new window from now, the fence unchanged.
-- A lease that is missing from the answer is lost. One with a null expires_at_ms is there but somebody has locked
-- its row: neither renewed nor lost.
CREATE FUNCTION syncguard_renew(p_keys TEXT[], p_lock_ids TEXT[], p_ttls_ms BIGINT[])
RETURNS TABLE (lock_id TEXT, expires_at_ms BIGINT)
LANGUAGE plpgsql VOLATILE
SET lock_timeout = '2s'
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
  v_count BIGINT;
BEGIN
  RETURN QUERY
  WITH wanted AS (
    SELECT w.key, w.lock_id, w.ttl_ms FROM unnest(p_keys, p_lock_ids, p_ttls_ms) AS w (key, lock_id, ttl_ms)
  ), locked AS (
    SELECT l.key, l.lock_id, l.expires_at_ms, w.ttl_ms
    FROM syncguard_locks l JOIN wanted w ON w.key = l.key AND w.lock_id = l.lock_id
    FOR NO KEY UPDATE OF l SKIP LOCKED
  )
  -- An expired lease is renewed only while nobody takes it over. The TypeScript client decides to by a read that locks
  -- no row, but under the advisory lock.
  UPDATE syncguard_locks l SET expires_at_ms = syncguard_clock_ms() + k.ttl_ms
  FROM locked k
  WHERE l.key = k.key AND l.lock_id = k.lock_id
    AND (k.expires_at_ms > syncguard_clock_ms() OR pg_try_advisory_xact_lock(hashtext(k.key)))
  RETURNING l.lock_id, l.expires_at_ms;
  GET DIAGNOSTICS v_count = ROW_COUNT;
  IF v_count < cardinality(p_keys) THEN
    RETURN QUERY
    SELECT l.lock_id, NULL::bigint
    FROM syncguard_locks l
    JOIN unnest(p_keys, p_lock_ids, p_ttls_ms) AS w (key, lock_id, ttl_ms) ON w.key = l.key AND w.lock_id = l.lock_id;
  END IF;
END
$$;

-- Ends a lease early: true if it was still there. Commits without waiting for the disk, as a release that a crash
-- loses costs others nothing but waiting, unless it records a completion (p_run_key for p_run_ttl_ms). That is recorded
-- while the lease is there; and, if p_attempt_done, also when it is gone: a run that ended well under its lease was alone and
-- is done, however late the database hears of it.
-- p_min_hold_ms keeps the key taken for so long after the acquire, under another lock_id: a renewal that was under way
-- must not find the lease any more. p_claim_key ends the task's claim.
-- p_attempt_done says that this attempt of the task ended by itself under its lease, so that a copy of it need not run and
-- the deaths before it are forgotten. A lease that was taken for dead and is released after all takes that death back.
-- Not for use inside a longer transaction: that would become asynchronous as a whole.
CREATE FUNCTION syncguard_release(
  p_key TEXT,
  p_lock_id TEXT,
  p_min_hold_ms BIGINT DEFAULT NULL,
  p_task_id TEXT DEFAULT NULL,
  p_run_key TEXT DEFAULT NULL,
  p_run_ttl_ms BIGINT DEFAULT NULL,
  p_claim_key TEXT DEFAULT NULL,
  p_attempt_done BOOLEAN DEFAULT FALSE,
  p_fingerprint TEXT DEFAULT NULL
) RETURNS BOOLEAN
LANGUAGE plpgsql VOLATILE
SET lock_timeout = '2s'
SET search_path FROM CURRENT
AS $$
DECLARE
  v_row syncguard_locks%ROWTYPE;
  v_now BIGINT;
BEGIN
  IF p_run_key IS NULL THEN
    PERFORM set_config('synchronous_commit', 'off', TRUE);
  ELSIF current_setting('synchronous_commit') = 'off' THEN
    -- Whatever a role is set to: a completion that a crash forgets is work that is done twice.
    PERFORM set_config('synchronous_commit', 'on', TRUE);
  END IF;
  IF p_min_hold_ms IS NOT NULL THEN
    UPDATE syncguard_locks l
    SET lock_id = reverse(l.lock_id), holder_lock_id = reverse(l.lock_id),
      expires_at_ms = l.acquired_at_ms + p_min_hold_ms, process = NULL, task_id = NULL
    WHERE l.key = p_key AND l.lock_id = p_lock_id AND l.acquired_at_ms + p_min_hold_ms > syncguard_clock_ms()
    RETURNING l.* INTO v_row;
  END IF;
  IF v_row.key IS NULL THEN
    DELETE FROM syncguard_locks l WHERE l.key = p_key AND l.lock_id = p_lock_id RETURNING l.* INTO v_row;
  END IF;
  -- After the lock's row, as in syncguard_acquire, so that the two cannot deadlock.
  IF p_claim_key IS NOT NULL THEN
    PERFORM syncguard_end_claim(p_claim_key, p_task_id);
  END IF;
  v_now := syncguard_clock_ms();
  IF p_run_key IS NOT NULL AND (v_row.key IS NOT NULL OR p_attempt_done) THEN
    INSERT INTO syncguard_completions AS c (run_key, task_id, completed_at_ms, expires_at_ms, fingerprint)
    VALUES (p_run_key, p_task_id, v_now, v_now + p_run_ttl_ms, p_fingerprint)
    ON CONFLICT (run_key) DO UPDATE
    SET task_id = excluded.task_id, completed_at_ms = excluded.completed_at_ms, expires_at_ms = excluded.expires_at_ms,
      fingerprint = excluded.fingerprint
    WHERE c.expires_at_ms <= v_now;
  END IF;
  IF p_attempt_done AND (v_row.key IS NULL OR v_row.deaths IS NOT NULL) THEN
    DELETE FROM syncguard_deaths d WHERE d.subject IN ('key:' || p_key, 'task:' || p_task_id);
  ELSIF v_row.key IS NULL THEN
    UPDATE syncguard_deaths d SET deaths = d.deaths - 1, lock_id = NULL
    WHERE d.subject IN ('key:' || p_key, 'task:' || p_task_id) AND d.lock_id = p_lock_id;
  END IF;
  IF v_row.key IS NULL THEN
    RETURN FALSE;
  END IF;
  IF p_attempt_done AND v_row.copies THEN
    INSERT INTO syncguard_completions AS c (run_key, task_id, completed_at_ms, expires_at_ms)
    VALUES (syncguard_attempt_key(coalesce(v_row.call_id, p_task_id), v_row.attempt), p_task_id, v_now, v_now + 3600000)
    ON CONFLICT (run_key) DO UPDATE SET expires_at_ms = excluded.expires_at_ms;
  END IF;
  -- A full queue would fail the whole release at its commit. Whoever waits looks by himself, too.
  IF v_row.waiting_until_ms > v_now AND pg_notification_queue_usage() < 0.5 THEN
    PERFORM pg_notify('syncguard_released', p_key);
  END IF;
  RETURN TRUE;
END
$$;

-- How one attempt is remembered among the completions, by its call and not by its task id, which may be used again.
CREATE FUNCTION syncguard_attempt_key(p_call_id TEXT, p_attempt INTEGER) RETURNS TEXT
LANGUAGE sql IMMUTABLE
RETURN 'attempt:' || p_call_id || ':' || p_attempt;

-- Counts a lease that ended because its process died.
CREATE FUNCTION syncguard_count_death(p_key TEXT, p_task_id TEXT, p_lock_id TEXT) RETURNS VOID
LANGUAGE plpgsql VOLATILE
SET lock_timeout = '2s'
SET search_path FROM CURRENT
AS $$
DECLARE
  v_now BIGINT := syncguard_clock_ms();
BEGIN
  INSERT INTO syncguard_deaths AS d (subject, deaths, last_at_ms, lock_id)
  VALUES ('key:' || p_key, 1, v_now, p_lock_id), ('task:' || p_task_id, 1, v_now, p_lock_id)
  ON CONFLICT (subject) DO UPDATE
  SET deaths = d.deaths + 1, last_at_ms = excluded.last_at_ms, lock_id = excluded.lock_id;
END
$$;

-- Frees the leases of one process that is known to be dead, and counts the deaths. `freed` is how many; `busy` how many
-- others have, whose rows somebody has locked (the server still ends the dead process's statement): ask again soon.
-- Waits for none of them. Also ends the claims that those leases' own acquires made, for messages that were
-- published without one. A claim that is older than the lease is its message's, which may come again: whoever watches
-- the message ends it.
CREATE FUNCTION syncguard_release_process(p_process TEXT, OUT freed INTEGER, OUT busy INTEGER)
LANGUAGE plpgsql VOLATILE
SET lock_timeout = '2s'
SET search_path FROM CURRENT
AS $$
DECLARE
  v_row RECORD;
BEGIN
  freed := 0;
  FOR v_row IN
    WITH free AS (
      SELECT l.key FROM syncguard_locks l
      WHERE l.process = p_process AND l.holder_lock_id = l.lock_id
      FOR UPDATE SKIP LOCKED
    ), freed AS (
      DELETE FROM syncguard_locks l USING free WHERE l.key = free.key
      RETURNING l.key, l.lock_id, l.task_id, l.claim_key, l.acquired_at_ms, l.waiting_until_ms
    )
    -- In the order in which others lock claims.
    SELECT * FROM freed ORDER BY claim_key
  LOOP
    freed := freed + 1;
    IF v_row.task_id IS NOT NULL THEN
      PERFORM syncguard_count_death(v_row.key, v_row.task_id, v_row.lock_id);
      -- Without the lock's row nobody could tell any more that this claim's worker is dead.
      DELETE FROM syncguard_claims c
      WHERE c.claim_key = v_row.claim_key AND c.task_id = v_row.task_id AND c.claimed_at_ms >= v_row.acquired_at_ms;
    END IF;
    IF v_row.waiting_until_ms > syncguard_clock_ms() AND pg_notification_queue_usage() < 0.5 THEN
      PERFORM pg_notify('syncguard_released', v_row.key);
    END IF;
  END LOOP;
  SELECT count(*) INTO busy FROM syncguard_locks l WHERE l.process = p_process AND l.holder_lock_id = l.lock_id;
END
$$;

-- Asks the present holder's release to notify the channel syncguard_released, for the next p_for_ms. False if there is
-- no lease to wait for: try again at once.
CREATE FUNCTION syncguard_wait(p_key TEXT, p_for_ms BIGINT) RETURNS BOOLEAN
LANGUAGE plpgsql VOLATILE
SET lock_timeout = '2s'
SET search_path FROM CURRENT
AS $$
DECLARE
  v_until BIGINT := syncguard_clock_ms() + p_for_ms;
BEGIN
  PERFORM 1 FROM syncguard_locks l WHERE l.key = p_key AND l.waiting_until_ms > v_until - p_for_ms / 2;
  IF FOUND THEN
    RETURN TRUE;
  END IF;
  PERFORM set_config('synchronous_commit', 'off', TRUE);
  UPDATE syncguard_locks l SET waiting_until_ms = v_until WHERE l.key = p_key;
  RETURN FOUND;
END
$$;

-- In the caller's transaction: true, and nobody can take the lock over until that transaction ends; or false, and the
-- caller must not commit. Renewals are not held up.
--
-- A row lock that is taken inside a savepoint is gone with a rollback to it, and no subtransaction can lock for its parent.
-- So a first proof inside a savepoint is refused (SG004), unless p_savepoint says that what is around it never commits.
-- The setting syncguard.fenced, local to the transaction, names the leases that were proved: a rollback to a savepoint
-- takes a name back together with its row lock, so what it names is locked until the end.
CREATE FUNCTION syncguard_fenced(
  p_key TEXT,
  p_lock_id TEXT,
  p_fence BIGINT,
  p_savepoint BOOLEAN DEFAULT FALSE
) RETURNS BOOLEAN
LANGUAGE plpgsql VOLATILE
SET lock_timeout = '2s'
SET search_path FROM CURRENT
AS $$
DECLARE
  v_proved TEXT := coalesce(current_setting('syncguard.fenced', TRUE), '');
  v_expires BIGINT;
  v_locker XID;
  v_top XID;
BEGIN
  IF strpos(v_proved, p_lock_id) > 0 THEN
    -- The row cannot have changed hands. An old snapshot would not even see its renewals.
    RETURN TRUE;
  END IF;
  PERFORM 1 FROM syncguard_locks l
  WHERE l.key = p_key AND l.lock_id = p_lock_id AND l.fence = lpad(p_fence::text, 15, '0')
  FOR KEY SHARE;
  IF NOT FOUND THEN
    RETURN FALSE;
  END IF;
  SELECT l.expires_at_ms, l.xmax INTO v_expires, v_locker
  FROM syncguard_locks l WHERE l.key = p_key AND l.lock_id = p_lock_id;
  IF v_expires <= syncguard_clock_ms() THEN
    RETURN FALSE;
  END IF;
  v_top := pg_current_xact_id()::xid;
  -- Most often the row says that the transaction itself has it locked. If not (a savepoint has, or several transactions,
  -- whose list has a number that may look like ours): an open savepoint that has locked a row has an id, locked by itself.
  IF NOT p_savepoint AND (v_locker <> v_top OR mxid_age(v_locker) > 0) AND EXISTS (
    SELECT 1 FROM pg_locks k
    WHERE k.locktype = 'transactionid' AND k.pid = pg_backend_pid() AND k.mode = 'ExclusiveLock' AND k.transactionid <> v_top
  ) THEN
    RAISE EXCEPTION 'the lock on % is proved inside a savepoint first', p_key
      USING ERRCODE = 'SG004', HINT = 'Prove it in the transaction, before its first savepoint.';
  END IF;
  PERFORM set_config('syncguard.fenced', v_proved || ' ' || p_lock_id, TRUE);
  RETURN TRUE;
END
$$;

-- In the caller's transaction, after syncguard_fenced: remembers that p_run_key is done. False if it already was.
CREATE FUNCTION syncguard_complete(
  p_run_key TEXT, p_task_id TEXT, p_ttl_ms BIGINT, p_fingerprint TEXT DEFAULT NULL
) RETURNS BOOLEAN
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
AS $$
DECLARE
  v_now BIGINT := syncguard_clock_ms();
BEGIN
  INSERT INTO syncguard_completions AS c (run_key, task_id, completed_at_ms, expires_at_ms, fingerprint)
  VALUES (p_run_key, p_task_id, v_now, v_now + p_ttl_ms, p_fingerprint)
  ON CONFLICT (run_key) DO UPDATE
  SET task_id = excluded.task_id, completed_at_ms = excluded.completed_at_ms, expires_at_ms = excluded.expires_at_ms,
    fingerprint = excluded.fingerprint
  WHERE c.expires_at_ms <= syncguard_clock_ms();
  RETURN FOUND;
END
$$;

-- Claims p_claim_key for the task p_task_id. `outcome` is 'claimed' (also when the task owns it already) or
-- 'duplicate', with the owner's task id, holder and times; a duplicate writes nothing. If a lease that the owner had for this
-- claim has expired, under whichever key, its worker is dead and its claim counts as over.
-- p_again: the task has begun, and is to run again: if another one has the claim, it comes next.
CREATE FUNCTION syncguard_claim(
  p_claim_key TEXT,
  p_task_id TEXT,
  p_ttl_ms BIGINT,
  p_holder TEXT DEFAULT NULL,
  p_again BOOLEAN DEFAULT FALSE,
  p_fingerprint TEXT DEFAULT NULL,
  OUT outcome TEXT,
  OUT now_ms BIGINT,
  OUT task_id TEXT,
  OUT holder TEXT,
  OUT claimed_at_ms BIGINT,
  OUT expires_at_ms BIGINT,
  OUT fingerprint TEXT
)
LANGUAGE plpgsql VOLATILE
SET lock_timeout = '2s'
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
  v_row syncguard_claims%ROWTYPE;
BEGIN
  FOR i IN 1..10 LOOP
    SELECT * INTO v_row FROM syncguard_claims c WHERE c.claim_key = p_claim_key;
    now_ms := syncguard_clock_ms();
    IF FOUND AND v_row.expires_at_ms > now_ms AND v_row.task_id <> p_task_id THEN
      PERFORM 1 FROM syncguard_locks l
      WHERE l.claim_key = p_claim_key AND l.task_id = v_row.task_id AND l.holder_lock_id = l.lock_id
        AND l.expires_at_ms <= now_ms;
      IF FOUND THEN
        DELETE FROM syncguard_claims c WHERE c.claim_key = p_claim_key AND c.task_id = v_row.task_id;
        CONTINUE;
      END IF;
      IF p_again THEN
        UPDATE syncguard_claims c SET next_task_id = p_task_id WHERE c.claim_key = p_claim_key AND c.task_id = v_row.task_id;
        CONTINUE WHEN NOT FOUND;
      END IF;
      outcome := 'duplicate';
    ELSE
      INSERT INTO syncguard_claims AS c (claim_key, task_id, holder, claimed_at_ms, expires_at_ms, fingerprint)
      VALUES (p_claim_key, p_task_id, p_holder, now_ms, now_ms + p_ttl_ms, p_fingerprint)
      ON CONFLICT (claim_key) DO UPDATE
      SET task_id = excluded.task_id, holder = excluded.holder,
        fingerprint = coalesce(excluded.fingerprint, CASE WHEN c.task_id = p_task_id THEN c.fingerprint END),
        next_task_id = CASE WHEN c.task_id = p_task_id THEN c.next_task_id END,
        claimed_at_ms = CASE WHEN c.task_id = p_task_id THEN c.claimed_at_ms ELSE syncguard_clock_ms() END,
        expires_at_ms = CASE
          WHEN c.task_id = p_task_id THEN greatest(c.expires_at_ms, syncguard_clock_ms() + p_ttl_ms)
          ELSE syncguard_clock_ms() + p_ttl_ms
        END
      WHERE c.task_id = p_task_id OR c.expires_at_ms <= syncguard_clock_ms()
      RETURNING c.* INTO v_row;
      IF FOUND THEN
        outcome := 'claimed';
      END IF;
    END IF;
    IF outcome IS NOT NULL THEN
      now_ms := syncguard_clock_ms();
      task_id := v_row.task_id;
      holder := v_row.holder;
      claimed_at_ms := v_row.claimed_at_ms;
      expires_at_ms := v_row.expires_at_ms;
      fingerprint := v_row.fingerprint;
      RETURN;
    END IF;
  END LOOP;
  RAISE EXCEPTION 'the claim on % changes hands faster than it can be read', p_claim_key USING ERRCODE = 'SG002';
END
$$;

-- The broker has accepted these messages: their claims now live for the given time from when they were claimed.
CREATE FUNCTION syncguard_confirm(p_claim_keys TEXT[], p_task_ids TEXT[], p_ttls_ms BIGINT[]) RETURNS INTEGER
LANGUAGE plpgsql VOLATILE
SET lock_timeout = '2s'
SET search_path FROM CURRENT
AS $$
DECLARE
  v_count INTEGER;
BEGIN
  WITH wanted AS (
    SELECT w.claim_key, w.task_id, w.ttl_ms
    FROM unnest(p_claim_keys, p_task_ids, p_ttls_ms) AS w (claim_key, task_id, ttl_ms)
  ), locked AS (
    SELECT c.claim_key, w.ttl_ms
    FROM syncguard_claims c JOIN wanted w ON w.claim_key = c.claim_key AND w.task_id = c.task_id
    ORDER BY c.claim_key
    FOR NO KEY UPDATE OF c
  )
  UPDATE syncguard_claims c SET expires_at_ms = greatest(c.expires_at_ms, c.claimed_at_ms + k.ttl_ms)
  FROM locked k WHERE c.claim_key = k.claim_key;
  GET DIAGNOSTICS v_count = ROW_COUNT;
  RETURN v_count;
END
$$;

-- The task's work has begun (p_ttl_ms: the claim goes to the task that waits to run again, for so long) or is over: its
-- claim ends. True if it was its own. A task that waited for somebody else's claim does so no longer.
CREATE FUNCTION syncguard_end_claim(p_claim_key TEXT, p_task_id TEXT, p_ttl_ms BIGINT DEFAULT NULL) RETURNS BOOLEAN
LANGUAGE plpgsql VOLATILE
SET lock_timeout = '2s'
SET search_path FROM CURRENT
AS $$
BEGIN
  IF p_ttl_ms IS NOT NULL THEN
    UPDATE syncguard_claims c
    SET task_id = c.next_task_id, next_task_id = NULL, holder = NULL, fingerprint = NULL, claimed_at_ms = syncguard_clock_ms(),
      expires_at_ms = syncguard_clock_ms() + p_ttl_ms
    WHERE c.claim_key = p_claim_key AND c.task_id = p_task_id AND c.next_task_id IS NOT NULL;
    IF FOUND THEN
      RETURN TRUE;
    END IF;
  END IF;
  DELETE FROM syncguard_claims c WHERE c.claim_key = p_claim_key AND c.task_id = p_task_id;
  IF FOUND THEN
    RETURN TRUE;
  END IF;
  UPDATE syncguard_claims c SET next_task_id = NULL WHERE c.claim_key = p_claim_key AND c.next_task_id = p_task_id;
  RETURN FALSE;
END
$$;

-- Ends a claim, if the task still owns it.
CREATE FUNCTION syncguard_unclaim(p_claim_key TEXT, p_task_id TEXT) RETURNS BOOLEAN
LANGUAGE plpgsql VOLATILE
SET lock_timeout = '2s'
SET search_path FROM CURRENT
AS $$
BEGIN
  PERFORM set_config('synchronous_commit', 'off', TRUE);
  RETURN syncguard_end_claim(p_claim_key, p_task_id);
END
$$;

-- The live leases, or the one on p_key, oldest first.
CREATE FUNCTION syncguard_list(p_key TEXT DEFAULT NULL, p_limit INTEGER DEFAULT NULL)
RETURNS TABLE (
  key TEXT, lock_id TEXT, fence TEXT, acquired_at_ms BIGINT, expires_at_ms BIGINT, now_ms BIGINT,
  holder TEXT, task_id TEXT, attempt INTEGER
)
LANGUAGE sql VOLATILE
SET search_path FROM CURRENT
AS $$
  SELECT l.key, l.lock_id, l.fence, l.acquired_at_ms, l.expires_at_ms, t.now_ms,
    CASE WHEN l.holder_lock_id = l.lock_id THEN l.holder END,
    CASE WHEN l.holder_lock_id = l.lock_id THEN l.task_id END,
    CASE WHEN l.holder_lock_id = l.lock_id THEN l.attempt END
  FROM (SELECT syncguard_clock_ms() AS now_ms) t, syncguard_locks l
  WHERE l.expires_at_ms > t.now_ms AND (p_key IS NULL OR l.key = p_key)
  ORDER BY l.acquired_at_ms, l.key
  LIMIT p_limit
$$;

-- Deletes what has been over for p_older_ms: expired leases, completions, claims, deaths; at most p_limit of each, and
-- waits for nobody. With p_counters also idle fence counters: only those that have moved past the clock, so that the
-- next fence is higher without them. The TypeScript client would start such a key at 1: not for tables shared with it.
-- A pruned lease takes the claim of its dead holder with it.
CREATE FUNCTION syncguard_prune(
  p_older_ms BIGINT,
  p_counters BOOLEAN DEFAULT FALSE,
  p_limit INTEGER DEFAULT 10000,
  OUT locks BIGINT,
  OUT completions BIGINT,
  OUT claims BIGINT,
  OUT deaths BIGINT,
  OUT counters BIGINT
)
LANGUAGE plpgsql VOLATILE
SET search_path FROM CURRENT
AS $$
DECLARE
  v_before BIGINT := syncguard_clock_ms() - p_older_ms;
  v_locks TID[] := ARRAY(
    SELECT l.ctid FROM syncguard_locks l WHERE l.expires_at_ms <= v_before LIMIT p_limit FOR UPDATE SKIP LOCKED
  );
  v_dead BIGINT;
BEGIN
  -- By an expired lease syncguard_claim tells that a claim's worker is dead, so the two go together: where somebody has
  -- the claim locked, both stay for the next time.
  DELETE FROM syncguard_claims WHERE ctid = ANY (ARRAY(
    SELECT c.ctid FROM syncguard_locks l JOIN syncguard_claims c ON c.claim_key = l.claim_key AND c.task_id = l.task_id
    WHERE l.ctid = ANY (v_locks) AND l.holder_lock_id = l.lock_id
    FOR UPDATE OF c SKIP LOCKED
  ));
  GET DIAGNOSTICS v_dead = ROW_COUNT;
  DELETE FROM syncguard_locks l
  WHERE l.ctid = ANY (v_locks) AND NOT EXISTS (
    SELECT 1 FROM syncguard_claims c
    WHERE c.claim_key = l.claim_key AND c.task_id = l.task_id AND l.holder_lock_id = l.lock_id
  );
  GET DIAGNOSTICS locks = ROW_COUNT;
  DELETE FROM syncguard_completions WHERE ctid = ANY (ARRAY(
    SELECT c.ctid FROM syncguard_completions c WHERE c.expires_at_ms <= v_before LIMIT p_limit FOR UPDATE SKIP LOCKED
  ));
  GET DIAGNOSTICS completions = ROW_COUNT;
  DELETE FROM syncguard_claims WHERE ctid = ANY (ARRAY(
    SELECT c.ctid FROM syncguard_claims c WHERE c.expires_at_ms <= v_before
    LIMIT greatest(p_limit - v_dead, 0) FOR UPDATE SKIP LOCKED
  ));
  GET DIAGNOSTICS claims = ROW_COUNT;
  claims := claims + v_dead;
  DELETE FROM syncguard_deaths WHERE ctid = ANY (ARRAY(
    SELECT d.ctid FROM syncguard_deaths d
    WHERE d.last_at_ms <= v_before - 7 * 86400000::bigint LIMIT p_limit FOR UPDATE SKIP LOCKED
  ));
  GET DIAGNOSTICS deaths = ROW_COUNT;
  counters := 0;
  IF p_counters THEN
    DELETE FROM syncguard_fence_counters WHERE ctid = ANY (ARRAY(
      SELECT c.ctid FROM syncguard_fence_counters c
      WHERE c.fence >= 1000000000000 AND c.fence < v_before
        AND NOT EXISTS (SELECT 1 FROM syncguard_locks l WHERE 'fence:' || l.key = c.fence_key)
      LIMIT p_limit FOR UPDATE SKIP LOCKED
    ));
    GET DIAGNOSTICS counters = ROW_COUNT;
  END IF;
END
$$;
