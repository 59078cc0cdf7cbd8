from tests.support.server.site import on_site as on_site
