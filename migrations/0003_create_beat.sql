-- The state of single-leader beat: entries, slots and terms, and the functions that a leader works with.
--
-- Who leads stays in syncguard_locks: every function that a leader writes with proves its lease there first
-- (syncguard_fenced), in the same transaction, so that a beat that lost it writes nothing and a takeover waits for the
-- leader's commit. Times are the server's; due_at is the instant at which a slot was due, never when it was sent.

-- One row per entry of a schedule. Slots are counted from last_due_at; those up to since_at are not sent, because the
-- entry was not there yet or had another schedule.
create table syncguard_beat_entries (
  leader_key text not null,
  entry text not null,
  schedule text not null,
  last_due_at timestamptz not null,
  since_at timestamptz not null,
  runs bigint not null default 0,
  next_due_at timestamptz,
  removed_at timestamptz,
  primary key (leader_key, entry)
);

-- One row per slot that a leader has claimed. Without sent_at and dropped_at it is still to be sent, under this task_id.
create table syncguard_beat_slots (
  leader_key text not null,
  entry text not null,
  due_at timestamptz not null,
  task_id text not null,
  term bigint not null,
  claimed_at timestamptz not null,
  sent_at timestamptz,
  dropped_at timestamptz,
  primary key (leader_key, entry, due_at)
);
create index idx_syncguard_beat_slots_claimed on syncguard_beat_slots (leader_key, claimed_at);
create index idx_syncguard_beat_slots_unsent on syncguard_beat_slots (leader_key, due_at)
where sent_at is null and dropped_at is null;

-- One row per term: who led, and how it went.
create table syncguard_beat_terms (
  leader_key text not null,
  term bigint not null,
  holder text not null,
  ttl_ms bigint not null,
  elected_at timestamptz not null,
  seen_at timestamptz not null,
  ended_at timestamptz,
  last_sent_at timestamptz,
  failing_since timestamptz,
  failure text,
  primary key (leader_key, term)
);

-- A leader says which entries it has, at its election and whenever they change. No rows: it is not the leader.
-- Otherwise the first row has no entry and tells the time; the others are the entries. p_now is the time by which the
-- leader goes, where it knows better than the server's clock.
-- An entry that comes back within an hour goes on where it stopped (a rolling deploy lets two schedules alternate).
create function syncguard_beat_enter(
  p_leader_key text,
  p_lock_key text,
  p_lock_id text,
  p_term bigint,
  p_holder text,
  p_ttl_ms bigint,
  p_entries text[],
  p_schedules text[],
  p_now timestamptz default null
) returns table (
  entry text, schedule text, last_due_at timestamptz, since_at timestamptz, runs bigint, now_at timestamptz
)
language plpgsql set lock_timeout = '2s' set search_path from current as $$
#variable_conflict use_column
declare
  v_now timestamptz;
begin
  if not syncguard_fenced(p_lock_key, p_lock_id, p_term) then
    return;
  end if;
  v_now := coalesce(p_now, clock_timestamp());
  insert into syncguard_beat_terms (leader_key, term, holder, ttl_ms, elected_at, seen_at)
  values (p_leader_key, p_term, p_holder, p_ttl_ms, clock_timestamp(), clock_timestamp())
  on conflict (leader_key, term) do nothing;
  update syncguard_beat_terms t set ended_at = t.seen_at
  where t.leader_key = p_leader_key and t.term < p_term and t.ended_at is null;
  insert into syncguard_beat_entries as e (leader_key, entry, schedule, last_due_at, since_at)
  select p_leader_key, w.entry, w.schedule, date_trunc('second', v_now), v_now
  from unnest(p_entries, p_schedules) as w (entry, schedule)
  on conflict (leader_key, entry) do update
  set schedule = excluded.schedule,
    since_at = case
      when e.schedule = excluded.schedule and e.removed_at > v_now - interval '1 hour' then e.since_at
      else v_now
    end,
    removed_at = null
  where e.schedule is distinct from excluded.schedule or e.removed_at is not null;
  update syncguard_beat_entries e set removed_at = v_now
  where e.leader_key = p_leader_key and e.removed_at is null and e.entry <> all (p_entries);
  return query
  select null::text, null::text, null::timestamptz, null::timestamptz, null::bigint, clock_timestamp();
  return query
  select e.entry, e.schedule, e.last_due_at, e.since_at, e.runs, v_now
  from syncguard_beat_entries e
  where e.leader_key = p_leader_key and e.entry = any (p_entries);
end
$$;

-- The clock was ahead and is right again: entries go back to where they were at p_now, the time by which the leader goes.
-- What was sent too early stays sent.
create function syncguard_beat_turn_back(
  p_leader_key text, p_lock_key text, p_lock_id text, p_term bigint, p_now timestamptz
) returns boolean
language plpgsql set lock_timeout = '2s' set search_path from current as $$
begin
  if not syncguard_fenced(p_lock_key, p_lock_id, p_term) then
    return false;
  end if;
  update syncguard_beat_entries e
  set since_at = least(e.since_at, p_now),
    next_due_at = null,
    last_due_at = case
      when e.last_due_at <= p_now then e.last_due_at
      else coalesce(
        (select max(s.due_at) from syncguard_beat_slots s
        where s.leader_key = e.leader_key and s.entry = e.entry and s.due_at <= p_now),
        date_trunc('second', p_now)
      )
    end
  where e.leader_key = p_leader_key and (e.last_due_at > p_now or e.since_at > p_now);
  return true;
end
$$;

-- Claims one slot for sending. `outcome`:
--   claimed  send it, with task_id. Also for one that was claimed before and never sent, because the leader that claimed
--            it, or its broker, died in between.
--   taken    it was sent, or given up.
--   lost     the caller is no longer the leader.
create function syncguard_beat_claim(
  p_leader_key text,
  p_lock_key text,
  p_lock_id text,
  p_term bigint,
  p_entry text,
  p_schedule text,
  p_due_at timestamptz,
  p_next_due_at timestamptz,
  p_task_id text,
  out outcome text,
  out task_id text,
  out now_at timestamptz
)
language plpgsql set lock_timeout = '2s' set search_path from current as $$
#variable_conflict use_column
begin
  if not syncguard_fenced(p_lock_key, p_lock_id, p_term) then
    outcome := 'lost';
    now_at := clock_timestamp();
    return;
  end if;
  insert into syncguard_beat_slots as s (leader_key, entry, due_at, task_id, term, claimed_at)
  values (p_leader_key, p_entry, p_due_at, p_task_id, p_term, clock_timestamp())
  on conflict (leader_key, entry, due_at) do update
  set term = excluded.term, claimed_at = excluded.claimed_at
  where s.sent_at is null and s.dropped_at is null
  returning s.task_id into task_id;
  if found then
    outcome := 'claimed';
    -- The row may have been deleted by hand: the schedule must not lose its place by that.
    insert into syncguard_beat_entries as e (leader_key, entry, schedule, last_due_at, since_at, runs, next_due_at)
    values (p_leader_key, p_entry, p_schedule, p_due_at, p_due_at, 1, p_next_due_at)
    on conflict (leader_key, entry) do update
    set last_due_at = excluded.last_due_at, runs = e.runs + 1, next_due_at = excluded.next_due_at
    where e.last_due_at < excluded.last_due_at;
  else
    outcome := 'taken';
  end if;
  now_at := clock_timestamp();
end
$$;

-- The broker has the message of this slot (or, with p_dropped, it is not to be sent any more). Not fenced: it is true
-- also if another beat leads by now.
create function syncguard_beat_sent(
  p_leader_key text, p_entry text, p_due_at timestamptz, p_term bigint, p_dropped boolean default false
) returns boolean
language plpgsql set lock_timeout = '2s' set search_path from current as $$
begin
  update syncguard_beat_slots s
  set sent_at = case when not p_dropped then clock_timestamp() end,
    dropped_at = case when p_dropped then clock_timestamp() end,
    term = case when p_dropped then s.term else p_term end
  where s.leader_key = p_leader_key and s.entry = p_entry and s.due_at = p_due_at
    and s.sent_at is null and not (p_dropped and s.dropped_at is not null);
  return found;
end
$$;

-- A sign of life of the leader, for people and probes: p_failure is why it cannot send now, NULL if it can; p_sent_at
-- its last send; p_ended: this term is over. Returns the time.
create function syncguard_beat_seen(
  p_leader_key text, p_term bigint, p_failure text, p_sent boolean, p_ended boolean default false
) returns timestamptz
language plpgsql set lock_timeout = '2s' set search_path from current as $$
declare
  v_now timestamptz := clock_timestamp();
begin
  perform set_config('synchronous_commit', 'off', true);
  update syncguard_beat_terms t
  set seen_at = v_now,
    last_sent_at = case when p_sent then v_now else t.last_sent_at end,
    failing_since = case when p_failure is null then null else coalesce(t.failing_since, v_now) end,
    failure = p_failure,
    ended_at = case when p_ended then v_now else t.ended_at end
  where t.leader_key = p_leader_key and t.term = p_term;
  return v_now;
end
$$;

-- Slots that were claimed and never sent, oldest first: the next leader's first work. A page of them, after the given one.
create function syncguard_beat_unsent(
  p_leader_key text,
  p_after_due_at timestamptz default '-infinity',
  p_after_entry text default '',
  p_limit integer default 1000
)
returns table (entry text, due_at timestamptz, task_id text)
language sql set search_path from current as $$
  select s.entry, s.due_at, s.task_id
  from syncguard_beat_slots s
  where s.leader_key = p_leader_key and s.sent_at is null and s.dropped_at is null
    and (s.due_at, s.entry) > (p_after_due_at, p_after_entry)
  order by s.due_at, s.entry
  limit p_limit
$$;

-- The latest slots, newest claim first.
create function syncguard_beat_recent(p_leader_key text, p_entry text default null, p_limit integer default 20)
returns table (
  entry text, due_at timestamptz, task_id text, term bigint, claimed_at timestamptz, sent_at timestamptz,
  dropped_at timestamptz
)
language sql set search_path from current as $$
  select s.entry, s.due_at, s.task_id, s.term, s.claimed_at, s.sent_at, s.dropped_at
  from syncguard_beat_slots s
  where s.leader_key = p_leader_key and (p_entry is null or s.entry = p_entry)
  order by s.claimed_at desc, s.due_at desc
  limit p_limit
$$;

-- The latest terms, newest first.
create function syncguard_beat_history(p_leader_key text, p_limit integer default 1)
returns table (
  term bigint, holder text, ttl_ms bigint, elected_at timestamptz, seen_at timestamptz, ended_at timestamptz,
  last_sent_at timestamptz, failing_since timestamptz, failure text, now_at timestamptz
)
language sql set search_path from current as $$
  select t.term, t.holder, t.ttl_ms, t.elected_at, t.seen_at, t.ended_at, t.last_sent_at, t.failing_since, t.failure,
    clock_timestamp()
  from syncguard_beat_terms t
  where t.leader_key = p_leader_key
  order by t.term desc
  limit p_limit
$$;

-- Deletes slots and terms that have been over for p_older_ms, and entries that were removed so long ago; at most
-- p_limit of each. Returns how many slots were deleted.
create function syncguard_beat_prune(p_leader_key text, p_older_ms bigint, p_limit integer default 10000)
returns bigint
language plpgsql set lock_timeout = '2s' set search_path from current as $$
declare
  v_before timestamptz := clock_timestamp() - p_older_ms * interval '1 millisecond';
  v_count bigint;
begin
  delete from syncguard_beat_slots where ctid = any (array(
    select s.ctid from syncguard_beat_slots s
    where s.leader_key = p_leader_key and s.claimed_at < v_before and s.due_at < v_before
    limit p_limit for update skip locked
  ));
  get diagnostics v_count = row_count;
  delete from syncguard_beat_terms t where t.leader_key = p_leader_key and t.seen_at < v_before;
  delete from syncguard_beat_entries e where e.leader_key = p_leader_key and e.removed_at < v_before;
  return v_count;
end
$$;
