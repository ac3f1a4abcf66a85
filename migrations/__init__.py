"""The schema as plain SQL files, and the runner that applies them in order, once, under a lock."""

from migrations.runner import Migration, MigrationState, load_migrations, migrate, migration_states

__all__ = ["Migration", "MigrationState", "load_migrations", "migrate", "migration_states"]
