"""What an operator can set: flags > YAML > environment > defaults."""

from router.settings.router_settings import RouterSettings, SettingsError, load_settings

__all__ = ["RouterSettings", "SettingsError", "load_settings"]
