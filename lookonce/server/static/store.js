// Conversations kept in this browser: an IndexedDB, or memory where the browser gives none.

const NAME = "lookonce";
const TABLE = "conversations";

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

async function database() {
  const opening = indexedDB.open(NAME, 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore(TABLE, { keyPath: "id" });
  return done(opening);
}

export class Store {
  constructor() {
    this.memory = new Map();
    this.opening = database().catch(() => null);
  }

  /** Runs `work(table)`, and waits until what it changed is kept. Answers null where there is no table. */
  async #with(mode, work) {
    const held = await this.opening;
    if (!held) return null;
    const transaction = held.transaction(TABLE, mode);
    const kept = new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onerror = transaction.onabort = () => reject(transaction.error);
    });
    const result = await done(work(transaction.objectStore(TABLE)));
    await kept;
    return { result };
  }

  /** The newest first. */
  async all() {
    const held = await this.#with("readonly", (table) => table.getAll());
    const found = held?.result ?? [...this.memory.values()];
    return found.sort((one, other) => other.updated - one.updated);
  }

  async get(id) {
    const held = await this.#with("readonly", (table) => table.get(id));
    return held ? held.result : this.memory.get(id);
  }

  /** `record` has an `id`, a `title`, `updated` in milliseconds, and `turns`. A full disk keeps it in memory. */
  async put(record) {
    const held = await this.#with("readwrite", (table) => table.put(record)).catch(() => null);
    if (!held) this.memory.set(record.id, record);
  }

  async remove(id) {
    this.memory.delete(id);
    await this.#with("readwrite", (table) => table.delete(id));
  }

  async clear() {
    this.memory.clear();
    await this.#with("readwrite", (table) => table.clear());
  }
}
