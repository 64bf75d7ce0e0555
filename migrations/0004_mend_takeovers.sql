-- Mends functions of 0001, whose comments hold for them still. Names, arguments and answers stay, so that whoever calls them
-- need not know.

-- What was completed while its lease was found expired is 'done'.
CREATE OR REPLACE FUNCTION syncguard_acquire(
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
  OUT outcome TEXT,
  OUT now_ms BIGINT,
  OUT lock_id TEXT,
  OUT fence BIGINT,
  OUT acquired_at_ms BIGINT,
  OUT expires_at_ms BIGINT,
  OUT holder TEXT,
  OUT task_id TEXT,
  OUT attempt INTEGER,
  OUT run_key TEXT,
  OUT deaths INTEGER
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
  v_deaths INTEGER := 0;
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
        RETURN;
      END IF;
    END LOOP;

    IF p_max_deaths IS NOT NULL AND p_task_id IS NOT NULL THEN
      SELECT d.deaths INTO v_deaths FROM syncguard_deaths d WHERE d.task_id = p_task_id;
      v_deaths := coalesce(v_deaths, 0);
      IF v_row.key IS NOT NULL AND v_row.task_id = p_task_id AND v_row.holder_lock_id = v_row.lock_id
        AND v_row.lock_id <> p_lock_id THEN
        v_deaths := v_deaths + 1;
      END IF;
      IF v_deaths >= p_max_deaths THEN
        outcome := 'dead';
        deaths := v_deaths;
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
        holder_lock_id, holder, process, task_id, attempt, claim_key
      )
      SELECT p_key, p_lock_id, t.now_ms + p_ttl_ms, t.now_ms, syncguard_fence_text(counter.fence), p_key,
        p_lock_id, p_holder, p_process, p_task_id, p_attempt, CASE WHEN p_claim_ttl_ms IS NOT NULL THEN p_claim_key END
      FROM counter, LATERAL (SELECT syncguard_clock_ms() + 0 * counter.fence AS now_ms) t
      ON CONFLICT (key) DO NOTHING
      RETURNING l.* INTO v_row;
      IF FOUND THEN
        outcome := 'granted';
      ELSE
        -- Only a writer that skips the advisory lock gets here.
        SELECT * INTO v_row FROM syncguard_locks l WHERE l.key = p_key;
        outcome := 'held';
      END IF;
    ELSE
      -- Expired. A row that somebody has locked is in use: by a transaction that called fenced(), or by a renewal.
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
        -- An expired row of p_lock_id itself is an answer that got lost long ago, not a death.
        IF v_row.task_id IS NOT NULL AND v_row.holder_lock_id = v_row.lock_id AND v_row.lock_id <> p_lock_id THEN
          INSERT INTO syncguard_deaths AS d (task_id, deaths, last_at_ms)
          VALUES (v_row.task_id, 1, now_ms)
          ON CONFLICT (task_id) DO UPDATE SET deaths = d.deaths + 1, last_at_ms = excluded.last_at_ms;
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
          attempt = p_attempt, claim_key = CASE WHEN p_claim_ttl_ms IS NOT NULL THEN p_claim_key END, copies = NULL, waiting_until_ms = NULL
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
        DELETE FROM syncguard_claims c WHERE c.claim_key = p_claim_key AND c.task_id = p_task_id;
      ELSE
        PERFORM 1 FROM syncguard_claims c
        WHERE c.claim_key = p_claim_key AND c.expires_at_ms > now_ms + p_claim_ttl_ms / 2;
        IF NOT FOUND THEN
          PERFORM syncguard_claim(p_claim_key, p_task_id, p_claim_ttl_ms, p_holder);
        END IF;
      END IF;
    END IF;
  ELSIF v_row.task_id = p_task_id AND v_row.attempt = p_attempt AND v_row.holder_lock_id = v_row.lock_id
    AND v_row.copies IS NOT TRUE THEN
    -- A copy of the very attempt that runs. The holder's release then leaves a completion for it.
    UPDATE syncguard_locks l SET copies = TRUE WHERE l.key = p_key AND l.lock_id = v_row.lock_id;
  END IF;

  lock_id := v_row.lock_id;
  fence := v_row.fence::bigint;
  acquired_at_ms := v_row.acquired_at_ms;
  expires_at_ms := v_row.expires_at_ms;
  now_ms := syncguard_clock_ms();
  IF v_row.holder_lock_id = v_row.lock_id THEN
    holder := v_row.holder;
    task_id := v_row.task_id;
    attempt := v_row.attempt;
  END IF;
END
$$;

-- Also ends the claims that those leases' own acquires made, for messages that were published without one. A claim that is
-- older than the lease is its message's, which may come again: whoever watches the message ends it.
CREATE OR REPLACE FUNCTION syncguard_release_process(p_process TEXT) RETURNS INTEGER
LANGUAGE plpgsql VOLATILE
SET lock_timeout = '2s'
SET search_path FROM CURRENT
AS $$
DECLARE
  v_row RECORD;
  v_count INTEGER := 0;
BEGIN
  FOR v_row IN
    WITH freed AS (
      DELETE FROM syncguard_locks l
      WHERE l.process = p_process AND l.holder_lock_id = l.lock_id
      RETURNING l.key, l.task_id, l.claim_key, l.acquired_at_ms, l.waiting_until_ms
    )
    -- In the order in which others lock claims.
    SELECT * FROM freed ORDER BY claim_key
  LOOP
    v_count := v_count + 1;
    IF v_row.task_id IS NOT NULL THEN
      INSERT INTO syncguard_deaths AS d (task_id, deaths, last_at_ms)
      VALUES (v_row.task_id, 1, syncguard_clock_ms())
      ON CONFLICT (task_id) DO UPDATE SET deaths = d.deaths + 1, last_at_ms = excluded.last_at_ms;
      -- Without the lock's row nobody could tell any more that this claim's worker is dead.
      DELETE FROM syncguard_claims c
      WHERE c.claim_key = v_row.claim_key AND c.task_id = v_row.task_id AND c.claimed_at_ms >= v_row.acquired_at_ms;
    END IF;
    IF v_row.waiting_until_ms > syncguard_clock_ms() THEN
      PERFORM pg_notify('syncguard_released', v_row.key);
    END IF;
  END LOOP;
  RETURN v_count;
END
$$;

-- A pruned lease takes the claim of its dead holder with it.
CREATE OR REPLACE FUNCTION syncguard_prune(
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
