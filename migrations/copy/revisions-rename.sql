-- From sync_revisions (user_id, last_revision) to sync_revisions (owner_id, last_revision), once.
--
-- For a table whose foreign key has the conventional name sync_revisions_user_id_fkey. Run it in one transaction. It
-- fails when it is repeated, on purpose: a rename that half applies must not look like one that is done.

alter table sync_revisions
    rename column user_id to owner_id;

alter table sync_revisions
    rename constraint sync_revisions_user_id_fkey to sync_revisions_owner_id_fkey;

alter table sync_revisions
    add constraint sync_revisions_last_revision_check check (last_revision >= 0);
