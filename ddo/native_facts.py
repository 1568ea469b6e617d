"""What the native library finds on this machine. Loads no torch; makes the device's context."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeFacts:
    """One device as the native library sees it.

    Attributes:
        is_available: Whether the driver has all that the allocator needs.
        reason: Why it has not; empty if it has.
        name: Of the device.
        compute_capability: Major and minor.
        granularity_bytes: The driver's page for virtual memory.
        has_read_only_registration: Whether weight files can be read by the device themselves.
        free_bytes: Device memory that nobody holds.
        total_bytes: All of it.
    """

    is_available: bool
    reason: str = ""
    name: str = ""
    compute_capability: tuple[int, int] | None = None
    granularity_bytes: int | None = None
    has_read_only_registration: bool | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None


def native_facts(ordinal: int = 0) -> NativeFacts:
    """Ask the library, the driver and a device; never raises for what is missing."""
    try:
        import native
    except ImportError as error:
        return NativeFacts(
            is_available=False, reason=f"the native extension cannot be imported: {error}"
        )
    is_available, reason = native.available()
    if not is_available:
        return NativeFacts(is_available=False, reason=reason)
    try:
        return facts_of(native.Device(native.open_driver(), ordinal))
    except native.NativeError as error:
        return NativeFacts(is_available=False, reason=str(error))


def facts_of(device: object) -> NativeFacts:
    """The facts of an opened `native.Device`."""
    import native

    assert isinstance(device, native.Device)
    free, total = device.memory_info()
    return NativeFacts(
        is_available=True,
        name=device.name,
        compute_capability=device.compute_capability,
        granularity_bytes=device.granularity,
        has_read_only_registration=device.has_read_only_registration,
        free_bytes=free,
        total_bytes=total,
    )
