-- A trigger function for tables of the user's own: a write with a lower fence than the stored one is refused by the
-- database, with SQLSTATE SG003, whoever makes it and whatever it forgot to check.
--
--   CREATE TRIGGER refuse_stale_fence BEFORE INSERT OR UPDATE ON reports
--   FOR EACH ROW EXECUTE FUNCTION syncguard_refuse_stale_fence('fence');
--
-- The first argument names the column that holds the fence (BIGINT or NUMERIC, or TEXT with the 15 digits). An UPDATE is
-- compared with the row that it replaces. An INSERT has none, so for a table that only grows name the columns that
-- tell what the fence belongs to, such as ('fence', 'account_id'): then an INSERT is compared with the highest fence of the
-- rows that agree in these, and writers of the same values take turns until their transactions end.
--
-- Equal fences pass, as one lease may write often. A null passes only where nothing with a fence is stored. Where this cannot
-- help: an UPDATE that leaves the column as it is looks like the last writer's own, and a DELETE carries no fence.

CREATE FUNCTION syncguard_refuse_stale_fence() RETURNS TRIGGER
LANGUAGE plpgsql
AS $$
DECLARE
  v_column TEXT := TG_ARGV[0];
  v_new JSONB := to_jsonb(NEW);
  v_fence NUMERIC;
  v_stored NUMERIC;
  v_where TEXT := '';
  v_keys JSONB := '{}';
BEGIN
  IF v_column IS NULL OR NOT v_new ? v_column THEN
    RAISE EXCEPTION 'trigger % on % needs the name of the fence column, got %', TG_NAME, TG_TABLE_NAME,
      coalesce(quote_literal(v_column), 'nothing') USING ERRCODE = 'undefined_column';
  END IF;
  v_fence := (v_new ->> v_column)::numeric;

  IF TG_OP <> 'INSERT' THEN
    v_stored := (to_jsonb(OLD) ->> v_column)::numeric;
  ELSIF TG_NARGS > 1 THEN
    FOR i IN 1..TG_NARGS - 1 LOOP
      IF NOT v_new ? TG_ARGV[i] THEN
        RAISE EXCEPTION 'trigger % on %: there is no column %', TG_NAME, TG_TABLE_NAME, quote_literal(TG_ARGV[i])
          USING ERRCODE = 'undefined_column';
      END IF;
      v_keys := v_keys || jsonb_build_object(TG_ARGV[i], v_new -> TG_ARGV[i]);
      v_where := v_where || format(' AND t.%1$I IS NOT DISTINCT FROM ($1).%1$I', TG_ARGV[i]);
    END LOOP;
    -- Without turns, two writers would not see each other's rows before they commit.
    PERFORM pg_advisory_xact_lock(hashtext(TG_RELID::text), hashtext(v_keys::text));
    EXECUTE format('SELECT max(t.%I::numeric) FROM %I.%I AS t WHERE true', v_column, TG_TABLE_SCHEMA, TG_TABLE_NAME)
      || v_where
    INTO v_stored USING NEW;
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
