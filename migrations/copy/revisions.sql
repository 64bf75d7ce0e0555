-- Revisions per owner, to copy into the migrations of the application that owns the rows.
--
-- Nothing runs this by itself: it is not one of the numbered migrations. Replace owner_id's missing foreign key by one
-- to your own table of owners, with the delete action that you want.

create table sync_revisions (
    owner_id uuid primary key,
    last_revision bigint not null default 0 check (last_revision >= 0)
);

comment on table sync_revisions is
    'The newest revision of each owner; moves in the transaction of the row that it stamps';

-- How far deletions are forgotten. No row: nothing has been purged. Its own table, so that sync_revisions stays what
-- baukit-sync made it.
create table sync_purge_horizons (
    owner_id uuid primary key references sync_revisions (owner_id) on delete cascade,
    horizon_revision bigint not null check (horizon_revision > 0),
    updated_at timestamptz not null default now()
);

comment on table sync_purge_horizons is
    'The highest revision of a purged tombstone of each owner; only rises';

-- Every synced table has these columns and this index:
--
--     create table notes (
--         id uuid primary key,
--         owner_id uuid not null,  -- references your own table of owners
--         updated_at timestamptz not null default now(),
--         deleted_at timestamptz,
--         revision bigint not null,
--         body text not null
--     );
--
--     create index notes_owner_id_revision_idx on notes (owner_id, revision);
--
-- deleted_at makes a deletion a row (a tombstone) that a reader can pull. A table that is purged needs this one too:
--
--     create index notes_deleted_at_idx on notes (deleted_at) where deleted_at is not null;
