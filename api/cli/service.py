"""The service's commands: ``serve``, ``worker``, ``migrate``, ``token``. Each imports its modules only when it runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from api.cli.terminal import reported

if TYPE_CHECKING:
    from api.jobs.tokens import TokenStore

DataDir = Annotated[Path | None, typer.Option(help="Where the database lies, where that is SQLite.")]
DatabaseUrl = Annotated[
    str | None, typer.Option(help="postgresql://user:password@host/name (better in SHARDPLAN_DATABASE_URL).")
]

tokens = typer.Typer(help="API tokens of the service.", no_args_is_help=True)


def add_service_commands(app: typer.Typer) -> None:
    """Add the commands of the service to the command line."""
    app.command("serve")(serve_command)
    app.command("worker")(worker_command)
    app.command("migrate")(migrate_command)
    app.add_typer(tokens, name="token")


def serve_command(
    host: Annotated[str | None, typer.Option(help="Address to listen on; 127.0.0.1 where left out.")] = None,
    port: Annotated[int | None, typer.Option(help="8000 where left out; 0 takes a free one.")] = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
    workers: Annotated[int | None, typer.Option(help="Plans made at once (SQLite).")] = None,
) -> None:
    """Serve plans over HTTP; SHARDPLAN_* in the environment, or a TOML file in SHARDPLAN_CONFIG, sets the rest.

    With SQLite it plans by itself; with PostgreSQL, `shardplan worker` does, here or on other machines.
    """
    with reported(as_json=False):
        from api.http.serve import serve

        options = {"host": host, "port": port, "data_dir": data_dir, "database_url": database_url, "workers": workers}
        serve(options)


def worker_command(
    database_url: DatabaseUrl = None,
    workers: Annotated[int | None, typer.Option(help="Plans made at once.")] = None,
    metrics_port: Annotated[int | None, typer.Option(help="Where Prometheus reads this worker's metrics.")] = None,
) -> None:
    """Plan the jobs of a PostgreSQL database until stopped; any number may run, on any number of machines."""
    with reported(as_json=False):
        from api.jobs.remote_worker import work

        work({"database_url": database_url, "workers": workers, "metrics_port": metrics_port})


def migrate_command(data_dir: DataDir = None, database_url: DatabaseUrl = None) -> None:
    """Bring the service's database to this version, create its first token where it has none, and exit.

    `serve` does the same when it starts.
    """
    with reported(as_json=False):
        from api.jobs.settings import read_settings
        from api.jobs.startup import open_database

        open_database(read_settings({"data_dir": data_dir, "database_url": database_url})).close()


@tokens.command("create")
def create_command(
    name: Annotated[str, typer.Argument(help="Whose it is, for people.")],
    scope: Annotated[str, typer.Option(help="read, plan (and read) or admin (everybody's jobs).")] = "plan",
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
) -> None:
    """Create a token and print it once. As soon as a token exists, every request needs one.

    Where there is no database yet, it is made in the default folder, or in a folder that exists.
    """
    with reported(as_json=False):
        typer.echo(_store(data_dir, database_url, makes=True).create(name, scope))


@tokens.command("revoke")
def revoke_command(
    token: Annotated[str, typer.Argument(help="Its id, as `token list` shows it (sp_ID_...).")],
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
) -> None:
    """Revoke a token: requests with it are refused from now on."""
    with reported(as_json=False):
        revoked = _store(data_dir, database_url).revoke(token)
        typer.echo(f"revoked {revoked.id} ({revoked.name})")


@tokens.command("list")
def list_command(data_dir: DataDir = None, database_url: DatabaseUrl = None) -> None:
    """List the tokens, revoked ones too."""
    with reported(as_json=False):
        for token in _store(data_dir, database_url).all():
            date = time.strftime("%Y-%m-%d", time.gmtime(token.created_at))
            state = "valid" if token.revoked_at is None else "revoked"
            typer.echo(f"{token.id}  {token.scope:5}  {state:7}  {date}  {token.name}")


def _store(data_dir: Path | None, database_url: str | None, *, makes: bool = False) -> TokenStore:
    """Return the tokens of the database that the settings name; ``makes``: a new one where there is none."""
    from api.jobs.database import Database
    from api.jobs.settings import ServerSettings, read_settings
    from api.jobs.startup import make_private
    from api.jobs.tokens import TokenStore
    from planner.errors import JobError

    settings = read_settings({"data_dir": data_dir, "database_url": database_url})
    if settings.database_url is None:
        folder = settings.data_dir
        if not settings.sqlite_file.exists():
            default = ServerSettings.model_fields["data_dir"].get_default(call_default_factory=True)
            if not makes or not (folder.is_dir() or folder == default):
                advice = "Give the --data-dir of `shardplan serve`; `shardplan migrate` makes a new database."
                detail = f"there is no database in {folder}" + ("." if folder.is_dir() else ", which does not exist.")
                raise JobError(detail, what_to_do=advice, field="data_dir")
            typer.echo(f"shardplan: a new database is made in {folder}.", err=True)
        make_private(settings)
    database = Database(settings.url)
    database.migrate()
    return TokenStore(database)
