-- Claims and completions: work that is queued or running, and work that is done; and what deletes all that is over.

-- What is finished: run_key is what a run_once task is remembered by, or one attempt of a task whose copy was seen
-- while it ran.
create table syncguard_completions (
  run_key text primary key,
  task_id text,
  completed_at_ms bigint not null,
  expires_at_ms bigint not null,
  fingerprint text
);
create index idx_syncguard_completions_expires on syncguard_completions (expires_at_ms);

-- Work that is queued or running. The task id owns the claim. fingerprint: of its arguments, as of a completion's; the
-- key says what counts as the same work, and this whether the arguments were the same too. next_task_id: a task that is
-- to run again under the same claim as soon as its owner starts (dedup_until="start").
create table syncguard_claims (
  claim_key text primary key,
  task_id text not null,
  holder text,
  claimed_at_ms bigint not null,
  expires_at_ms bigint not null,
  next_task_id text,
  fingerprint text
);
create index idx_syncguard_claims_expires on syncguard_claims (expires_at_ms);

-- In the caller's transaction, after syncguard_fenced: remembers that p_run_key is done. False if it already was.
create function syncguard_complete(
  p_run_key text, p_task_id text, p_ttl_ms bigint, p_fingerprint text default null
) returns boolean
language plpgsql set search_path from current as $$
declare
  v_now bigint := syncguard_clock_ms();
begin
  insert into syncguard_completions as c (run_key, task_id, completed_at_ms, expires_at_ms, fingerprint)
  values (p_run_key, p_task_id, v_now, v_now + p_ttl_ms, p_fingerprint)
  on conflict (run_key) do update
  set task_id = excluded.task_id, completed_at_ms = excluded.completed_at_ms, expires_at_ms = excluded.expires_at_ms,
    fingerprint = excluded.fingerprint
  where c.expires_at_ms <= syncguard_clock_ms();
  return found;
end
$$;

-- Claims p_claim_key for the task p_task_id. `outcome` is 'claimed' (also when the task owns it already) or
-- 'duplicate', with the owner's task id, holder and times; a duplicate writes nothing. If a lease that the owner had for
-- this claim has expired, on any key, its worker is dead and its claim is over.
-- p_again: the task has begun, and is to run again: if another one has the claim, it comes next.
create function syncguard_claim(
  p_claim_key text,
  p_task_id text,
  p_ttl_ms bigint,
  p_holder text default null,
  p_again boolean default false,
  p_fingerprint text default null,
  out outcome text,
  out now_ms bigint,
  out task_id text,
  out holder text,
  out claimed_at_ms bigint,
  out expires_at_ms bigint,
  out fingerprint text
)
language plpgsql set lock_timeout = '2s' set search_path from current as $$
#variable_conflict use_column
declare
  v_row syncguard_claims%rowtype;
begin
  for i in 1..10 loop
    select * into v_row from syncguard_claims c where c.claim_key = p_claim_key;
    now_ms := syncguard_clock_ms();
    if found and v_row.expires_at_ms > now_ms and v_row.task_id <> p_task_id then
      perform 1 from syncguard_locks l
      where l.claim_key = p_claim_key and l.task_id = v_row.task_id and l.holder_lock_id = l.lock_id
        and l.expires_at_ms <= now_ms;
      if found then
        perform syncguard_end_claim(p_claim_key, v_row.task_id, p_since_ms => 0);
        continue;
      end if;
      if p_again then
        update syncguard_claims c set next_task_id = p_task_id where c.claim_key = p_claim_key and c.task_id = v_row.task_id;
        continue when not found;
      end if;
      outcome := 'duplicate';
    else
      insert into syncguard_claims as c (claim_key, task_id, holder, claimed_at_ms, expires_at_ms, fingerprint)
      values (p_claim_key, p_task_id, p_holder, now_ms, now_ms + p_ttl_ms, p_fingerprint)
      on conflict (claim_key) do update
      set task_id = excluded.task_id, holder = excluded.holder,
        fingerprint = coalesce(excluded.fingerprint, case when c.task_id = p_task_id then c.fingerprint end),
        next_task_id = case when c.task_id = p_task_id then c.next_task_id end,
        claimed_at_ms = case when c.task_id = p_task_id then c.claimed_at_ms else syncguard_clock_ms() end,
        expires_at_ms = case
          when c.task_id = p_task_id then greatest(c.expires_at_ms, syncguard_clock_ms() + p_ttl_ms)
          else syncguard_clock_ms() + p_ttl_ms
        end
      where c.task_id = p_task_id or c.expires_at_ms <= syncguard_clock_ms()
      returning c.* into v_row;
      if found then
        outcome := 'claimed';
      end if;
    end if;
    if outcome is not null then
      now_ms := syncguard_clock_ms();
      task_id := v_row.task_id;
      holder := v_row.holder;
      claimed_at_ms := v_row.claimed_at_ms;
      expires_at_ms := v_row.expires_at_ms;
      fingerprint := v_row.fingerprint;
      return;
    end if;
  end loop;
  raise exception 'the claim on % changes hands faster than it can be read', p_claim_key using errcode = 'SG002';
end
$$;

-- The broker has accepted these messages: their claims now live for the given time from when they were claimed.
create function syncguard_confirm(p_claim_keys text[], p_task_ids text[], p_ttls_ms bigint[]) returns integer
language plpgsql set lock_timeout = '2s' set search_path from current as $$
declare
  v_count integer;
begin
  with wanted as (
    select w.claim_key, w.task_id, w.ttl_ms
    from unnest(p_claim_keys, p_task_ids, p_ttls_ms) as w (claim_key, task_id, ttl_ms)
  ), locked as (
    select c.claim_key, w.ttl_ms
    from syncguard_claims c join wanted w on w.claim_key = c.claim_key and w.task_id = c.task_id
    order by c.claim_key
    for no key update of c
  )
  update syncguard_claims c set expires_at_ms = greatest(c.expires_at_ms, c.claimed_at_ms + k.ttl_ms)
  from locked k where c.claim_key = k.claim_key;
  get diagnostics v_count = row_count;
  return v_count;
end
$$;

-- Ends a claim: every claim that ends before its time, or is pruned after it, does so here. True if the task owned it.
--   p_next_ttl_ms  the task's work has begun: the claim goes to the task that waits to run again, for so long.
--   p_since_ms     the task's process is dead: its claim ends if it was made at this instant or later. Without it, a task
--                  that waited to run again under another one's claim does so no longer.
create function syncguard_end_claim(
  p_claim_key text, p_task_id text, p_next_ttl_ms bigint default null, p_since_ms bigint default null
) returns boolean
language plpgsql set lock_timeout = '2s' set search_path from current as $$
begin
  if p_next_ttl_ms is not null then
    update syncguard_claims c
    set task_id = c.next_task_id, next_task_id = null, holder = null, fingerprint = null, claimed_at_ms = syncguard_clock_ms(),
      expires_at_ms = syncguard_clock_ms() + p_next_ttl_ms
    where c.claim_key = p_claim_key and c.task_id = p_task_id and c.next_task_id is not null;
    if found then
      return true;
    end if;
  end if;
  delete from syncguard_claims c
  where c.claim_key = p_claim_key and c.task_id = p_task_id and c.claimed_at_ms >= coalesce(p_since_ms, c.claimed_at_ms);
  if found then
    return true;
  end if;
  if p_since_ms is null then
    update syncguard_claims c set next_task_id = null where c.claim_key = p_claim_key and c.next_task_id = p_task_id;
  end if;
  return false;
end
$$;

-- Ends a task's claim, by hand or because its work is over. Commits without waiting for the disk.
create function syncguard_unclaim(p_claim_key text, p_task_id text) returns boolean
language sql set search_path from current as $$
  select syncguard_end_claim(p_claim_key, p_task_id) from set_config('synchronous_commit', 'off', true)
$$;

-- Deletes what has been over for p_older_ms: expired leases, completions, claims, deaths; at most p_limit of each, and
-- waits for no row. With p_counters also idle fence counters: only those that the clock has passed, so that the next
-- fence is higher without them. The TypeScript client would start such a key at 1: not for tables shared with it.
-- A pruned lease takes the claim of its dead holder with it.
create function syncguard_prune(
  p_older_ms bigint,
  p_counters boolean default false,
  p_limit integer default 10000,
  out locks bigint,
  out completions bigint,
  out claims bigint,
  out deaths bigint,
  out counters bigint
)
language plpgsql set search_path from current as $$
declare
  v_before bigint := syncguard_clock_ms() - p_older_ms;
  v_locks tid[] := array(
    select l.ctid from syncguard_locks l where l.expires_at_ms <= v_before limit p_limit for update skip locked
  );
  v_dead bigint;
begin
  -- The expired lease tells syncguard_claim that a claim's worker is dead, so the two go together: where the claim is
  -- locked, both stay for the next time.
  select count(*) filter (where syncguard_end_claim(c.claim_key, c.task_id, p_since_ms => 0)) into v_dead
  from (
    select c.claim_key, c.task_id
    from syncguard_locks l join syncguard_claims c on c.claim_key = l.claim_key and c.task_id = l.task_id
    where l.ctid = any (v_locks) and l.holder_lock_id = l.lock_id
    for update of c skip locked
  ) c;
  delete from syncguard_locks l
  where l.ctid = any (v_locks) and not exists (
    select 1 from syncguard_claims c
    where c.claim_key = l.claim_key and c.task_id = l.task_id and l.holder_lock_id = l.lock_id
  );
  get diagnostics locks = row_count;
  delete from syncguard_completions where ctid = any (array(
    select c.ctid from syncguard_completions c where c.expires_at_ms <= v_before limit p_limit for update skip locked
  ));
  get diagnostics completions = row_count;
  select v_dead + count(*) filter (where syncguard_end_claim(c.claim_key, c.task_id, p_since_ms => 0)) into claims
  from (
    select c.claim_key, c.task_id from syncguard_claims c where c.expires_at_ms <= v_before
    limit greatest(p_limit - v_dead, 0) for update skip locked
  ) c;
  delete from syncguard_deaths where ctid = any (array(
    select d.ctid from syncguard_deaths d
    where d.last_at_ms <= v_before - 7 * 86400000::bigint limit p_limit for update skip locked
  ));
  get diagnostics deaths = row_count;
  counters := 0;
  if p_counters then
    delete from syncguard_fence_counters where ctid = any (array(
      select c.ctid from syncguard_fence_counters c
      where c.fence >= 1000000000000 and c.fence < v_before
        and not exists (select 1 from syncguard_locks l where 'fence:' || l.key = c.fence_key)
      limit p_limit for update skip locked
    ));
    get diagnostics counters = row_count;
  end if;
end
$$;
