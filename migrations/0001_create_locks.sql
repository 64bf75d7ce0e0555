-- Locks: leases, their fence counters, and the deaths of the processes that held them.
--
-- The tables up to the marked columns are kriasoft/syncguard's PostgreSQL schema, to the letter, so that its TypeScript
-- client and this library can share them; tables that it made are adopted. The columns below the mark are ours and
-- nullable.
--
-- Rules that every function keeps:
--   * time is clock_timestamp(), read after a row lock was granted, so that waiting takes nothing from a ttl;
--   * a function that gives a lock row to a new lease takes the TypeScript client's advisory lock first;
--   * a wait for a row lock has a bound;
--   * a fence is computed inside the update of the counter, under the counter's row lock.

do $$
begin
  if to_regclass('syncguard_locks') is not null then
    raise warning 'the tables of the TypeScript client are adopted and get columns: services that use it now must connect '
      'anew once, as their prepared statements fail until then ("cached plan must not change result type")';
  end if;
end
$$;

create table if not exists syncguard_locks (
  key text primary key,
  lock_id text not null,
  expires_at_ms bigint not null,
  acquired_at_ms bigint not null,
  fence text not null,
  user_key text not null
);

create unique index if not exists idx_syncguard_locks_lock_id on syncguard_locks (lock_id);
create index if not exists idx_syncguard_locks_expires on syncguard_locks (expires_at_ms);

create table if not exists syncguard_fence_counters (
  fence_key text primary key,
  fence bigint not null default 0,
  key_debug text
);

alter table syncguard_locks
add column if not exists expires_at_ts timestamptz generated always as (to_timestamp(expires_at_ms / 1000.0)) stored,
add column if not exists acquired_at_ts timestamptz generated always as (to_timestamp(acquired_at_ms / 1000.0)) stored;

-- Ours. They describe the lease named by holder_lock_id. The TypeScript client leaves them as they are when it takes a
-- row over, so they count only while holder_lock_id = lock_id.
alter table syncguard_locks
add column holder_lock_id text,
add column holder text,
add column process text,
add column task_id text,
add column attempt integer,
add column call_id text,
add column claim_key text,
add column copies boolean,
add column waiting_until_ms bigint,
add column deaths integer;

-- The expired lease of its task tells that a claim is over (syncguard_claim).
create index idx_syncguard_locks_claim on syncguard_locks (claim_key) where claim_key is not null;

-- How many leases in a row ended because their process died instead of by a release. The subject is `task:` and a task
-- id, or `key:` and a lock's key; lock_id is the last of these leases. An attempt that ends by itself deletes the row.
create table syncguard_deaths (
  subject text primary key,
  deaths integer not null,
  last_at_ms bigint not null,
  lock_id text
);

-- The server's clock in milliseconds since 1970. Never stale: it moves inside a transaction.
create function syncguard_clock_ms() returns bigint
language sql volatile
return (extract(epoch from clock_timestamp()) * 1000)::bigint;

-- A fence as it is stored and compared: 15 digits. A counter that has left the range is refused.
create function syncguard_fence_text(p_fence bigint) returns text
language plpgsql immutable set search_path from current as $$
begin
  if p_fence < 0 or p_fence > 900000000000000 then
    raise exception 'fence % is out of range', p_fence using errcode = 'SG001';
  end if;
  return lpad(p_fence::text, 15, '0');
end
$$;

-- Takes the lock `p_key` for `p_ttl_ms`. The `outcome`:
--   granted  lock_id, fence, acquired_at_ms, expires_at_ms are the new lease's. Repeating a call with the same
--            p_lock_id while that lease lives returns the same grant again.
--   held     another lease is live: its lock_id, fence, times, holder, task_id, attempt, call_id (where known). Writes
--            nothing.
--   done     one of p_run_keys is completed: run_key, task_id, acquired_at_ms (the moment of completion).
--   dead     the last p_max_deaths leases of p_task_id ended by the death of their process: deaths, task_id. Or the last
--            2 * p_max_deaths on p_key did, of any task, and the last of them within an hour: deaths, no task_id.
-- p_claim_key with p_claim_ttl_ms keeps the task's claim alive for the run; without p_claim_ttl_ms the claim ends here.
-- p_claim_wait_ms keeps it alive while the lock is held.
create function syncguard_acquire(
  p_key text,
  p_lock_id text,
  p_ttl_ms bigint,
  p_holder text default null,
  p_process text default null,
  p_task_id text default null,
  p_attempt integer default null,
  p_run_keys text[] default null,
  p_max_deaths integer default null,
  p_claim_key text default null,
  p_claim_ttl_ms bigint default null,
  p_call_id text default null,
  p_claim_wait_ms bigint default null,
  out outcome text,
  out now_ms bigint,
  out lock_id text,
  out fence bigint,
  out acquired_at_ms bigint,
  out expires_at_ms bigint,
  out holder text,
  out task_id text,
  out attempt integer,
  out call_id text,
  out run_key text,
  out deaths integer,
  out fingerprint text
)
language plpgsql set lock_timeout = '2s' set search_path from current as $$
#variable_conflict use_column
declare
  v_row syncguard_locks%rowtype;
  v_run_key text;
  v_died boolean := false;
  v_deaths integer;
  v_key_deaths integer;
  v_locked boolean := false;
begin
  -- Two looks: without the advisory lock, so that a held lock costs one read; and again with it, since the first may
  -- be out of date by then.
  loop
    select * into v_row from syncguard_locks l where l.key = p_key;
    now_ms := syncguard_clock_ms();
    if found and v_row.expires_at_ms > now_ms then
      outcome := case when v_row.lock_id = p_lock_id then 'granted' else 'held' end;
      exit;
    end if;
    exit when v_locked;
    perform pg_advisory_xact_lock(hashtext(p_key));
    -- Waits for a renewal, a waiter or a prune that writes the row, so that from here on only a transaction that called
    -- fenced() can have it locked.
    perform 1 from syncguard_locks l where l.key = p_key for no key update;
    v_locked := true;
  end loop;

  if outcome is null and v_row.key is not null then
    -- Expired. If the row is locked, a transaction that called fenced() uses it. Once it is ours, nothing more can be
    -- completed under the old lease, so what is done is looked up after this.
    perform 1 from syncguard_locks l
    where l.key = p_key and l.lock_id = v_row.lock_id and l.expires_at_ms <= now_ms
    for update skip locked;
    if not found then
      select * into v_row from syncguard_locks l where l.key = p_key;
      outcome := 'held';
    end if;
  end if;

  if outcome is null then
    -- A holder writes its completion before the lock is free. One by one: an `= any` over all of them would be planned
    -- anew in every call.
    foreach v_run_key in array coalesce(p_run_keys, '{}') loop
      select 'done', c.run_key, c.task_id, c.completed_at_ms, c.fingerprint
      into outcome, run_key, task_id, acquired_at_ms, fingerprint
      from syncguard_completions c
      where c.run_key = v_run_key and c.expires_at_ms > now_ms;
      if found then
        return;
      end if;
    end loop;
    if v_row.key is not null and p_run_keys is not null and current_setting('transaction_isolation') <> 'read committed' then
      -- There every look sees what was there at the start. Only the index knows what came since: a conflict with that
      -- fails to serialize, and the repeated call sees it.
      insert into syncguard_completions (run_key, completed_at_ms, expires_at_ms)
      select w.run_key, 0, 0 from unnest(p_run_keys) as w (run_key)
      on conflict do nothing;
      delete from syncguard_completions c where c.run_key = any (p_run_keys) and c.expires_at_ms = 0;
    end if;

    -- An expired lease of the process that asks is no death, as that process lives. Nor is an expired lease of p_lock_id
    -- itself: the answer to that acquire was lost long ago.
    v_died := v_row.key is not null and v_row.task_id is not null and v_row.holder_lock_id = v_row.lock_id
      and v_row.lock_id <> p_lock_id and not coalesce(v_row.process = p_process, false);
    if p_max_deaths is not null and p_task_id is not null then
      select d.deaths into v_deaths from syncguard_deaths d where d.subject = 'task:' || p_task_id;
      -- 0 for a row that is too old to count, not null: a good attempt must still delete it.
      select case when d.last_at_ms > now_ms - 3600000 then d.deaths else 0 end into v_key_deaths
      from syncguard_deaths d where d.subject = 'key:' || p_key;
      if v_died and v_row.task_id = p_task_id then
        v_deaths := coalesce(v_deaths, 0) + 1;
      end if;
      if v_died and v_row.expires_at_ms > now_ms - 3600000 then
        v_key_deaths := coalesce(v_key_deaths, 0) + 1;
      end if;
      if v_deaths >= p_max_deaths then
        outcome := 'dead';
        deaths := v_deaths;
        task_id := p_task_id;
        return;
      elsif v_key_deaths >= 2 * p_max_deaths then
        outcome := 'dead';
        deaths := v_key_deaths;
        return;
      end if;
    end if;
    if v_died then
      perform syncguard_count_death(p_key, v_row.task_id, v_row.lock_id);
      v_key_deaths := coalesce(v_key_deaths, 1);
      if v_row.claim_key is not null and v_row.task_id is distinct from p_task_id then
        -- Unless this is its next delivery, the work that the dead process claimed is over.
        perform syncguard_end_claim(v_row.claim_key, v_row.task_id, p_since_ms => 0);
      end if;
    end if;

    -- `+ 0 * counter.fence` has the clock read after the counter's row lock was granted.
    with counter as (
      insert into syncguard_fence_counters as c (fence_key, fence, key_debug)
      values ('fence:' || p_key, syncguard_clock_ms(), p_key)
      on conflict (fence_key) do update set fence = greatest(c.fence + 1, syncguard_clock_ms())
      returning c.fence
    )
    insert into syncguard_locks as l (
      key, lock_id, expires_at_ms, acquired_at_ms, fence, user_key,
      holder_lock_id, holder, process, task_id, attempt, call_id, claim_key, deaths
    )
    select p_key, p_lock_id, t.now_ms + p_ttl_ms, t.now_ms, syncguard_fence_text(counter.fence), p_key,
      p_lock_id, p_holder, p_process, p_task_id, p_attempt, p_call_id, case when p_claim_ttl_ms is not null then p_claim_key end,
      coalesce(v_deaths, v_key_deaths)
    from counter, lateral (select syncguard_clock_ms() + 0 * counter.fence as now_ms) t
    on conflict (key) do update
    set lock_id = excluded.lock_id, expires_at_ms = excluded.expires_at_ms, acquired_at_ms = excluded.acquired_at_ms,
      fence = excluded.fence, user_key = excluded.user_key, holder_lock_id = excluded.holder_lock_id,
      holder = excluded.holder, process = excluded.process, task_id = excluded.task_id, attempt = excluded.attempt,
      call_id = excluded.call_id, claim_key = excluded.claim_key, copies = null, waiting_until_ms = null,
      deaths = excluded.deaths
    where l.lock_id = v_row.lock_id
    returning l.* into v_row;
    if found then
      outcome := 'granted';
    else
      -- Only a writer that skips the advisory lock makes a row in between.
      select * into v_row from syncguard_locks l where l.key = p_key;
      if not found then
        raise exception 'the lock on % changes hands faster than it can be read', p_key using errcode = '40001';
      end if;
      outcome := 'held';
    end if;
  end if;

  if outcome = 'granted' then
    if p_claim_key is not null then
      if p_claim_ttl_ms is null then
        perform syncguard_end_claim(p_claim_key, p_task_id, p_claim_wait_ms);
      else
        perform 1 from syncguard_claims c
        where c.claim_key = p_claim_key and c.expires_at_ms > now_ms + p_claim_ttl_ms / 2;
        if not found then
          perform syncguard_claim(p_claim_key, p_task_id, p_claim_ttl_ms, p_holder);
        end if;
      end if;
    end if;
  elsif v_row.task_id = p_task_id and v_row.attempt = p_attempt and v_row.call_id is not distinct from p_call_id
    and v_row.holder_lock_id = v_row.lock_id and v_row.copies is not true then
    -- A copy of the very attempt that runs. The holder's release then leaves a completion for it.
    update syncguard_locks l set copies = true where l.key = p_key and l.lock_id = v_row.lock_id;
  end if;

  if outcome = 'held' and p_claim_wait_ms is not null then
    -- The claim lives as long as its message waits.
    update syncguard_claims c set expires_at_ms = now_ms + p_claim_wait_ms
    where c.claim_key = p_claim_key and c.task_id = p_task_id and c.expires_at_ms < now_ms + p_claim_wait_ms / 2;
  end if;

  lock_id := v_row.lock_id;
  -- Other clients write this table too: a fence that is not a number is null here.
  fence := case when v_row.fence ~ '^[0-9]{1,18}$' then v_row.fence::bigint end;
  acquired_at_ms := v_row.acquired_at_ms;
  expires_at_ms := v_row.expires_at_ms;
  now_ms := syncguard_clock_ms();
  if v_row.holder_lock_id = v_row.lock_id then
    holder := v_row.holder;
    task_id := v_row.task_id;
    attempt := v_row.attempt;
    call_id := v_row.call_id;
  end if;
end
$$;

-- Renews every given lease that is still there, in one statement: a full new window from now, the fence unchanged.
-- A lease that is missing from the answer is lost. One with a null expires_at_ms is there, but its row is locked:
-- neither renewed nor lost.
create function syncguard_renew(p_keys text[], p_lock_ids text[], p_ttls_ms bigint[])
returns table (lock_id text, expires_at_ms bigint)
language plpgsql set lock_timeout = '2s' set search_path from current as $$
#variable_conflict use_column
declare
  v_count bigint;
begin
  return query
  with wanted as (
    select w.key, w.lock_id, w.ttl_ms from unnest(p_keys, p_lock_ids, p_ttls_ms) as w (key, lock_id, ttl_ms)
  ), locked as (
    select l.key, l.lock_id, l.expires_at_ms, w.ttl_ms
    from syncguard_locks l join wanted w on w.key = l.key and w.lock_id = l.lock_id
    for no key update of l skip locked
  )
  -- An expired lease is renewed only while it is not being taken over. The TypeScript client decides to by a read that
  -- locks no row, but under the advisory lock.
  update syncguard_locks l set expires_at_ms = syncguard_clock_ms() + k.ttl_ms
  from locked k
  where l.key = k.key and l.lock_id = k.lock_id
    and (k.expires_at_ms > syncguard_clock_ms() or pg_try_advisory_xact_lock(hashtext(k.key)))
  returning l.lock_id, l.expires_at_ms;
  get diagnostics v_count = row_count;
  if v_count < cardinality(p_keys) then
    return query
    select l.lock_id, null::bigint
    from syncguard_locks l
    join unnest(p_keys, p_lock_ids, p_ttls_ms) as w (key, lock_id, ttl_ms) on w.key = l.key and w.lock_id = l.lock_id;
  end if;
end
$$;

-- Ends a lease early: true if it was still there. Commits without waiting for the disk, as a crash that loses a release
-- costs others only a wait, unless it records a completion (p_run_key for p_run_ttl_ms). That is recorded while the
-- lease is there; and, if p_attempt_done, also when it is gone: a run that ended well under its lease was alone and is
-- done, however late the database hears of it.
-- p_min_hold_ms leaves the key reserved for so long after the acquire: the row then belongs to no process and no task,
-- and has another lock_id, as a renewal that was under way must not find the lease any more.
-- p_claim_key ends the task's claim.
-- p_attempt_done says that this attempt of the task ended by itself under its lease, so that a copy of it need not run and
-- the deaths before it are forgotten. A lease that was taken for dead and is released after all takes that death back.
-- Not for use inside a longer transaction: that would become asynchronous as a whole.
create function syncguard_release(
  p_key text,
  p_lock_id text,
  p_min_hold_ms bigint default null,
  p_task_id text default null,
  p_run_key text default null,
  p_run_ttl_ms bigint default null,
  p_claim_key text default null,
  p_attempt_done boolean default false,
  p_fingerprint text default null
) returns boolean
language plpgsql set lock_timeout = '2s' set search_path from current as $$
declare
  v_row syncguard_locks%rowtype;
begin
  if p_run_key is null then
    perform set_config('synchronous_commit', 'off', true);
  elsif current_setting('synchronous_commit') = 'off' then
    -- Also for a role that is set to off: work whose completion a crash forgets is done twice.
    perform set_config('synchronous_commit', 'on', true);
  end if;
  if p_min_hold_ms is not null then
    update syncguard_locks l
    set lock_id = reverse(l.lock_id), holder_lock_id = reverse(l.lock_id),
      expires_at_ms = l.acquired_at_ms + p_min_hold_ms, process = null, task_id = null
    where l.key = p_key and l.lock_id = p_lock_id and l.acquired_at_ms + p_min_hold_ms > syncguard_clock_ms()
    returning l.* into v_row;
  end if;
  if v_row.key is null then
    delete from syncguard_locks l where l.key = p_key and l.lock_id = p_lock_id returning l.* into v_row;
  end if;
  -- After the lock's row, as in syncguard_acquire, so that the two cannot deadlock.
  if p_claim_key is not null then
    perform syncguard_end_claim(p_claim_key, p_task_id);
  end if;
  if p_run_key is not null and (v_row.key is not null or p_attempt_done) then
    perform syncguard_complete(p_run_key, p_task_id, p_run_ttl_ms, p_fingerprint);
  end if;
  if p_attempt_done and (v_row.key is null or v_row.deaths is not null) then
    delete from syncguard_deaths d where d.subject in ('key:' || p_key, 'task:' || p_task_id);
  elsif v_row.key is null then
    update syncguard_deaths d set deaths = d.deaths - 1, lock_id = null
    where d.subject in ('key:' || p_key, 'task:' || p_task_id) and d.lock_id = p_lock_id;
  end if;
  if v_row.key is null then
    return false;
  end if;
  if p_attempt_done and v_row.copies then
    -- By the call, as a task id may be used again.
    perform syncguard_complete(
      'attempt:' || coalesce(v_row.call_id, p_task_id) || ':' || v_row.attempt, p_task_id, 3600000
    );
  end if;
  -- A full queue would fail the whole release at its commit. A waiter also looks by itself.
  if v_row.waiting_until_ms > syncguard_clock_ms() and pg_notification_queue_usage() < 0.5 then
    perform pg_notify('syncguard_released', p_key);
  end if;
  return true;
end
$$;

-- Counts a lease that ended because its process died.
create function syncguard_count_death(p_key text, p_task_id text, p_lock_id text) returns void
language plpgsql set lock_timeout = '2s' set search_path from current as $$
declare
  v_now bigint := syncguard_clock_ms();
begin
  insert into syncguard_deaths as d (subject, deaths, last_at_ms, lock_id)
  values ('key:' || p_key, 1, v_now, p_lock_id), ('task:' || p_task_id, 1, v_now, p_lock_id)
  on conflict (subject) do update
  set deaths = d.deaths + 1, last_at_ms = excluded.last_at_ms, lock_id = excluded.lock_id;
end
$$;

-- Frees the leases of one process that is known to be dead, and counts the deaths. `freed` is how many; `busy` how many
-- are left because their rows are locked (the server still ends the dead process's statement): ask again soon.
-- Waits for no row. Also ends the claims that those leases' own acquires made, for messages that were published without
-- one. A claim that is older than the lease is its message's, which may come again: the process that watches the message
-- ends it.
create function syncguard_release_process(p_process text, out freed integer, out busy integer)
language plpgsql set lock_timeout = '2s' set search_path from current as $$
declare
  v_row record;
begin
  freed := 0;
  for v_row in
    with free as (
      select l.key from syncguard_locks l
      where l.process = p_process and l.holder_lock_id = l.lock_id
      for update skip locked
    ), freed as (
      delete from syncguard_locks l using free where l.key = free.key
      returning l.key, l.lock_id, l.task_id, l.claim_key, l.acquired_at_ms, l.waiting_until_ms
    )
    -- In the order in which others lock claims.
    select * from freed order by claim_key
  loop
    freed := freed + 1;
    if v_row.task_id is not null then
      perform syncguard_count_death(v_row.key, v_row.task_id, v_row.lock_id);
      -- Now: without the lock's row nothing tells any more that this claim's worker is dead.
      if v_row.claim_key is not null then
        perform syncguard_end_claim(v_row.claim_key, v_row.task_id, p_since_ms => v_row.acquired_at_ms);
      end if;
    end if;
    if v_row.waiting_until_ms > syncguard_clock_ms() and pg_notification_queue_usage() < 0.5 then
      perform pg_notify('syncguard_released', v_row.key);
    end if;
  end loop;
  select count(*) into busy from syncguard_locks l where l.process = p_process and l.holder_lock_id = l.lock_id;
end
$$;

-- Asks the present holder's release to notify the channel syncguard_released, for the next p_for_ms. False if there is
-- no lease to wait for: try again at once.
create function syncguard_wait(p_key text, p_for_ms bigint) returns boolean
language plpgsql set lock_timeout = '2s' set search_path from current as $$
declare
  v_until bigint := syncguard_clock_ms() + p_for_ms;
begin
  perform 1 from syncguard_locks l where l.key = p_key and l.waiting_until_ms > v_until - p_for_ms / 2;
  if found then
    return true;
  end if;
  perform set_config('synchronous_commit', 'off', true);
  update syncguard_locks l set waiting_until_ms = v_until where l.key = p_key;
  return found;
end
$$;

-- In the caller's transaction: true, and the lock cannot be taken over until that transaction ends; or false, and the
-- caller must not commit. Renewals do not wait for it.
--
-- A row lock that is taken inside a savepoint is gone with a rollback to it, and no subtransaction can lock for its parent.
-- So a first proof inside a savepoint is refused (SG004), unless p_savepoint says that what is around it never commits.
-- The setting syncguard.fenced, local to the transaction, names the leases that were proved: a rollback to a savepoint
-- takes a name back together with its row lock, so what it names is locked until the end.
create function syncguard_fenced(
  p_key text,
  p_lock_id text,
  p_fence bigint,
  p_savepoint boolean default false
) returns boolean
language plpgsql set lock_timeout = '2s' set search_path from current as $$
declare
  v_proved text := coalesce(current_setting('syncguard.fenced', true), '');
  v_expires bigint;
  v_locker xid;
  v_top xid;
begin
  if strpos(v_proved, p_lock_id) > 0 then
    -- The row cannot have changed hands. An old snapshot would not even see its renewals.
    return true;
  end if;
  perform 1 from syncguard_locks l
  where l.key = p_key and l.lock_id = p_lock_id and l.fence = lpad(p_fence::text, 15, '0')
  for key share;
  if not found then
    return false;
  end if;
  select l.expires_at_ms, l.xmax into v_expires, v_locker
  from syncguard_locks l where l.key = p_key and l.lock_id = p_lock_id;
  if v_expires <= syncguard_clock_ms() then
    return false;
  end if;
  v_top := pg_current_xact_id()::xid;
  -- Mostly the row says that the transaction itself has it locked. If not (a savepoint has, or several transactions,
  -- whose list has a number that may look like ours): an open savepoint that has locked a row has an id, locked by itself.
  if not p_savepoint and (v_locker <> v_top or mxid_age(v_locker) > 0) and exists (
    select 1 from pg_locks k
    where k.locktype = 'transactionid' and k.pid = pg_backend_pid() and k.mode = 'ExclusiveLock' and k.transactionid <> v_top
  ) then
    raise exception 'the lock on % is proved inside a savepoint first', p_key
      using errcode = 'SG004', hint = 'Prove it in the transaction, before its first savepoint.';
  end if;
  perform set_config('syncguard.fenced', v_proved || ' ' || p_lock_id, true);
  return true;
end
$$;

-- The live leases, or the one on p_key, oldest first.
create function syncguard_list(p_key text default null, p_limit integer default null)
returns table (
  key text, lock_id text, fence text, acquired_at_ms bigint, expires_at_ms bigint, now_ms bigint,
  holder text, task_id text, attempt integer
)
language sql set search_path from current as $$
  select l.key, l.lock_id, l.fence, l.acquired_at_ms, l.expires_at_ms, t.now_ms,
    case when l.holder_lock_id = l.lock_id then l.holder end,
    case when l.holder_lock_id = l.lock_id then l.task_id end,
    case when l.holder_lock_id = l.lock_id then l.attempt end
  from (select syncguard_clock_ms() as now_ms) t, syncguard_locks l
  where l.expires_at_ms > t.now_ms and (p_key is null or l.key = p_key)
  order by l.acquired_at_ms, l.key
  limit p_limit
$$;
