-- A trigger function for tables of the user's own: a write with a lower fence than the stored one is refused by the
-- database, with SQLSTATE SG003, whoever makes it and whatever it forgot to check.
--
--   CREATE TRIGGER refuse_stale_fence BEFORE INSERT OR UPDATE ON reports
--   FOR EACH ROW EXECUTE FUNCTION syncguard_refuse_stale_fence('fence');
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
CREATE FUNCTION syncguard_refuse_stale_fence() RETURNS TRIGGER
LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
  v_column TEXT := TG_ARGV[0];
  v_new JSONB := to_jsonb(NEW);
  v_old JSONB := to_jsonb(OLD);
  v_fence NUMERIC;
  v_stored NUMERIC;
  v_moved BOOLEAN := FALSE;
  v_table REGCLASS := coalesce(pg_partition_root(TG_RELID), TG_RELID);
  v_values TEXT;
  v_where TEXT;
  v_hidden TEXT;
BEGIN
  IF (v_new ? v_column) IS NOT TRUE THEN
    RAISE EXCEPTION 'trigger % on % is for each row, for insert or update, and needs the name of the fence column, got %',
      TG_NAME, TG_TABLE_NAME, coalesce(quote_literal(v_column), 'nothing') USING ERRCODE = 'undefined_column';
  END IF;
  v_fence := (v_new ->> v_column)::numeric;
  v_stored := (v_old ->> v_column)::numeric;

  FOR i IN 1..TG_NARGS - 1 LOOP
    IF NOT v_new ? TG_ARGV[i] THEN
      RAISE EXCEPTION 'trigger % on %: there is no column %', TG_NAME, TG_TABLE_NAME, quote_literal(TG_ARGV[i])
        USING ERRCODE = 'undefined_column';
    END IF;
    v_moved := v_moved OR (v_new -> TG_ARGV[i]) IS DISTINCT FROM (v_old -> TG_ARGV[i]);
  END LOOP;

  IF v_moved THEN
    -- Equality is each type's own, by its default operator class: 1 is 1.0, and citext knows no case.
    SELECT string_agg(format('($1).%I', c.attname), ', '),
      string_agg(
        CASE
          WHEN v_new -> c.attname::text = 'null' THEN format(' AND t.%I IS NULL', c.attname)
          ELSE format(
            ' AND t.%1$I OPERATOR(%2$s) ($1).%1$I',
            c.attname,
            coalesce(o.oprnamespace::regnamespace || '.' || o.oprname, 'pg_catalog.=')
          )
        END,
        ''
      ),
      min(format('column %I is generated', c.attname)) FILTER (WHERE c.attgenerated <> '')
    INTO v_values, v_where, v_hidden
    FROM pg_attribute c
    JOIN pg_type y ON y.oid = c.atttypid
    LEFT JOIN pg_opclass e ON e.opcmethod = 403 AND e.opcdefault AND e.opcintype = coalesce(nullif(y.typbasetype, 0), y.oid)
    LEFT JOIN pg_amop a ON a.amopfamily = e.opcfamily AND a.amopstrategy = 3
      AND a.amoplefttype = e.opcintype AND a.amoprighttype = e.opcintype
    LEFT JOIN pg_operator o ON o.oid = a.amopopr
    WHERE c.attrelid = TG_RELID AND c.attname::text = ANY (TG_ARGV[1:TG_NARGS - 1]);
    IF row_security_active(v_table::oid) THEN
      v_hidden := format('row security of %1$s applies to %2$I', v_table, current_user);
    ELSIF current_setting('transaction_isolation') <> 'read committed' THEN
      v_hidden := format('the transaction is %1$s', current_setting('transaction_isolation'));
    END IF;
    IF v_hidden IS NOT NULL THEN
      RAISE EXCEPTION 'trigger % on % cannot see every fence: %', TG_NAME, TG_TABLE_NAME, v_hidden
        USING ERRCODE = 'feature_not_supported',
          HINT = 'Write in READ COMMITTED, as a role that row security lets pass, and name no generated column.';
    END IF;
    -- Without turns, two writers would not see each other's rows before they commit.
    EXECUTE format('SELECT pg_advisory_xact_lock(hashtext($2::text), hash_record(ROW(%1$s)))', v_values)
    USING NEW, v_table::oid;
    EXECUTE format(
      CASE jsonb_typeof(v_new -> v_column)
        WHEN 'number' THEN 'SELECT greatest($2, max(t.%1$I)::numeric) FROM %2$s AS t WHERE true%3$s'
        ELSE 'SELECT greatest($2, max(t.%1$I::numeric)) FROM %2$s AS t WHERE true%3$s'
      END,
      v_column, v_table, v_where
    ) INTO v_stored USING NEW, v_stored;
  END IF;

  IF v_stored IS NOT NULL AND (v_fence IS NULL OR v_fence < v_stored) THEN
    RAISE EXCEPTION 'stale fence % for %: % is stored', coalesce(v_fence::text, 'null'), TG_TABLE_NAME, v_stored
      USING ERRCODE = 'SG003',
        DETAIL = 'Somebody with a newer lease has written meanwhile.',
        HINT = 'The lease of this writer is lost: give up, do not repeat.';
  END IF;
  RETURN NEW;
END
$$;
