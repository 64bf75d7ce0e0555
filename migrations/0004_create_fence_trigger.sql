-- A trigger function for tables of the user's own: a write with a lower fence than the stored one is refused by the
-- database, with SQLSTATE SG003, from every writer, also one that checks nothing.
--
--   create trigger refuse_stale_fence before insert or update on reports
--   for each row execute function syncguard_refuse_stale_fence('fence');
--
-- The first argument names the column that holds the fence (BIGINT or NUMERIC, or TEXT with the 15 digits). An UPDATE is
-- compared with the row that it replaces. An INSERT has none, so for a table that only grows name the columns that
-- tell what the fence belongs to, such as ('fence', 'account_id'): then an INSERT, and an UPDATE that changes one of them, is
-- compared with the highest fence of the rows that agree in these, in all partitions, and writers of the same values take
-- turns until their transactions end. Refused is what would hide such a row: another isolation level than READ COMMITTED,
-- row security that applies to the writer, and a generated column, whose value is not known yet.
--
-- Equal fences pass, as one lease may write often. A null passes only where nothing with a fence is stored. Where this cannot
-- help: an UPDATE that leaves the column as it is looks like the last writer's own, and a DELETE carries no fence.

-- Runs as the writer, so nothing is looked for in the writer's search_path, nor in ours: others may create there.
create function syncguard_refuse_stale_fence() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_column text := tg_argv[0];
  v_new jsonb := to_jsonb(new);
  v_old jsonb := to_jsonb(old);
  v_fence numeric;
  v_stored numeric;
  v_moved boolean := false;
  v_table regclass := coalesce(pg_partition_root(tg_relid), tg_relid);
  v_values text;
  v_where text;
  v_hidden text;
begin
  if (v_new ? v_column) is not true then
    raise exception 'trigger % on % is for each row, for insert or update, and needs the name of the fence column, got %',
      tg_name, tg_table_name, coalesce(quote_literal(v_column), 'nothing') using errcode = 'undefined_column';
  end if;
  v_fence := (v_new ->> v_column)::numeric;
  v_stored := (v_old ->> v_column)::numeric;

  for i in 1..tg_nargs - 1 loop
    if not v_new ? tg_argv[i] then
      raise exception 'trigger % on %: there is no column %', tg_name, tg_table_name, quote_literal(tg_argv[i])
        using errcode = 'undefined_column';
    end if;
    v_moved := v_moved or (v_new -> tg_argv[i]) is distinct from (v_old -> tg_argv[i]);
  end loop;

  if v_moved then
    -- Equality is each type's own, by its default operator class: 1 is 1.0, and citext knows no case.
    select string_agg(format('($1).%I', c.attname), ', '),
      string_agg(
        case
          when v_new -> c.attname::text = 'null' then format(' and t.%I is null', c.attname)
          else format(
            ' and t.%1$I operator(%2$s) ($1).%1$I',
            c.attname,
            coalesce(o.oprnamespace::regnamespace || '.' || o.oprname, 'pg_catalog.=')
          )
        end,
        ''
      ),
      min(format('column %I is generated', c.attname)) filter (where c.attgenerated <> '')
    into v_values, v_where, v_hidden
    from pg_attribute c
    join pg_type y on y.oid = c.atttypid
    left join pg_opclass e on e.opcmethod = 403 and e.opcdefault and e.opcintype = coalesce(nullif(y.typbasetype, 0), y.oid)
    left join pg_amop a on a.amopfamily = e.opcfamily and a.amopstrategy = 3
      and a.amoplefttype = e.opcintype and a.amoprighttype = e.opcintype
    left join pg_operator o on o.oid = a.amopopr
    where c.attrelid = tg_relid and c.attname::text = any (tg_argv[1:tg_nargs - 1]);
    if row_security_active(v_table::oid) then
      v_hidden := format('row security of %1$s applies to %2$I', v_table, current_user);
    elsif current_setting('transaction_isolation') <> 'read committed' then
      v_hidden := format('the transaction is %1$s', current_setting('transaction_isolation'));
    end if;
    if v_hidden is not null then
      raise exception 'trigger % on % cannot see every fence: %', tg_name, tg_table_name, v_hidden
        using errcode = 'feature_not_supported',
          hint = 'Write in READ COMMITTED, as a role that row security lets pass, and name no generated column.';
    end if;
    -- Without turns, two writers would not see each other's rows before they commit.
    execute format('select pg_advisory_xact_lock(hashtext($2::text), hash_record(row(%1$s)))', v_values)
    using new, v_table::oid;
    execute format(
      case jsonb_typeof(v_new -> v_column)
        when 'number' then 'select greatest($2, max(t.%1$I)::numeric) from %2$s as t where true%3$s'
        else 'select greatest($2, max(t.%1$I::numeric)) from %2$s as t where true%3$s'
      end,
      v_column, v_table, v_where
    ) into v_stored using new, v_stored;
  end if;

  if v_stored is not null and (v_fence is null or v_fence < v_stored) then
    raise exception 'stale fence % for %: % is stored', coalesce(v_fence::text, 'null'), tg_table_name, v_stored
      using errcode = 'SG003',
        detail = 'A writer with a newer lease has written meanwhile.',
        hint = 'The lease of this writer is lost: give up, do not repeat.';
  end if;
  return new;
end
$$;
