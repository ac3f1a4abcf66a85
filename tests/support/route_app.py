"""The application of tests.support.routes as a server's process serves it: ``uvicorn tests.support.route_app:app``."""

import os
from typing import Any, cast

from tests.support.routes import Shop

shop = Shop(os.environ["FENCEPOST_DATABASE_URL"], cast("Any", None))
app = shop.app(wait_seconds=25)
